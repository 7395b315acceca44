"""DeepSpeed's part of the JSON: what we read of it, and what it would silently ignore.

DeepSpeed 0.19.8 ignores unknown top-level keys and several known ones that do not apply to the run at
hand. A configuration that would be ignored is an error here, before anything starts.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from m6.errors import UserError, nearest

OPTIMIZERS = ("AdamW", "Adafactor")

# Keys that reach DeepSpeed unchanged and do what they say.
PASSED_ON = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer", "fp16", "bf16", "torch_autocast", "zero_optimization", "zero_force_ds_cpu_optimizer",
    "steps_per_print", "wall_clock_breakdown", "communication_data_type", "comms_logger", "memory_breakdown",
    "dump_state", "timers", "aio",
}  # fmt: skip

# Keys that DeepSpeed knows but that would be ignored or would contradict ours, with what to use instead.
REFUSED = {
    "scheduler": "the learning rate is m6.schedule",
    "activation_checkpointing": "DeepSpeed does not apply it to the model; use m6.training.activation_checkpointing",
    "checkpoint": "checkpoints are m6.checkpoint",
    "wandb": "use m6.logging.wandb",
    "tensorboard": "use m6.logging.tensorboard",
    "csv_monitor": "RUN/metrics.jsonl holds every metric",
    "data_types": "a separate gradient dtype changes DeepSpeed's optimizer; gradients have the precision of fp16/bf16",
    "data_efficiency": "the data pipeline is m6.data",
    "curriculum_learning": "the data pipeline is m6.data",
    "elasticity": "set train_batch_size; the accumulation adapts to the world size",
    "expert_parallel": "expert parallelism is m6.training.ep_size",
    "tensor_parallel": "not supported by the M6 model",
    "pipeline": "not supported by the M6 model",
    "prescale_gradients": "gradients are normalised by the tokens of the global batch",
    "gradient_predivide_factor": "gradients are normalised by the tokens of the global batch",
    "zero_allow_untested_optimizer": "the supported optimizers are AdamW and Adafactor",
    "amp": "use bf16, fp16 or torch_autocast",
}


class DeepSpeedSettings(BaseModel):
    """What the trainer needs to know of DeepSpeed's keys, and the keys themselves."""

    model_config = ConfigDict(frozen=True)

    train_batch_size: int
    micro_batch_size: int
    stated_accumulation: int | None
    gradient_clipping: float
    zero_stage: int
    precision: str
    """``fp32``, ``bf16`` or ``fp16``: the type of the weights in the forward pass."""
    optimizer_type: str
    optimizer_params: dict[str, Any]
    keys: dict[str, Any]

    def accumulation_steps(self, world_size: int) -> int:
        """train_batch_size / (micro-batch x world size), or an error that names all three."""
        per_step = self.micro_batch_size * world_size
        if self.train_batch_size % per_step:
            raise UserError(
                f"train_batch_size {self.train_batch_size} is not a multiple of train_micro_batch_size_per_gpu "
                f"{self.micro_batch_size} x {world_size} ranks = {per_step}; "
                f"try train_batch_size {max(1, round(self.train_batch_size / per_step)) * per_step}"
            )
        accumulation = self.train_batch_size // per_step
        if self.stated_accumulation not in (None, accumulation):
            raise UserError(
                f"gradient_accumulation_steps {self.stated_accumulation} contradicts train_batch_size "
                f"{self.train_batch_size} / ({self.micro_batch_size} x {world_size} ranks) = "
                f"{accumulation}; leave it out"
            )
        return accumulation

    def check_experts(self, ep_size: int) -> None:
        """Raises if expert parallelism meets a ZeRO stage that DeepSpeed refuses it at."""
        if ep_size > 1 and self.zero_stage == 3:
            raise UserError(
                f"zero_optimization.stage 3 cannot hold experts split over m6.training.ep_size {ep_size}; "
                "use stage 0, 1 or 2, or ep_size 1"
            )

    def engine_config(self, world_size: int) -> dict[str, Any]:
        """The dictionary for ``deepspeed.initialize``: the optimizer is ours to build, so it is taken out."""
        config = {key: value for key, value in self.keys.items() if key != "optimizer"}
        config["gradient_accumulation_steps"] = self.accumulation_steps(world_size)
        config.setdefault("steps_per_print", None)
        if self.zero_stage == 0:
            # At stage 0 the trainer clips by itself: DeepSpeed neither reports the norm nor counts
            # the experts of other ranks there.
            config["gradient_clipping"] = 0.0
        config["zero_force_ds_cpu_optimizer"] = False
        return config


def split_deepspeed(keys: dict[str, Any]) -> DeepSpeedSettings:
    """Validates DeepSpeed's keys against what DeepSpeed does with them.

    Raises:
        UserError: an unknown key, one that would be silently ignored, or one that must be written out.
    """
    for key in keys:
        if key in REFUSED:
            raise UserError(f"{key}: not used here: {REFUSED[key]}")
        if key not in PASSED_ON:
            raise UserError(f"{key}: unknown key{nearest(key, PASSED_ON | {'m6'})}")
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if not _is_count(keys.get(key)):
            raise UserError(f"{key}: expected a positive whole number, found {keys.get(key)!r}")
    if "gradient_clipping" not in keys:
        raise UserError("gradient_clipping: missing; DeepSpeed would clip at 1.0, so write the value (0 for none)")
    precision = _precision(keys)
    stage = _zero_stage(keys.get("zero_optimization", {}), precision)
    optimizer_type, optimizer_params = _optimizer(keys.get("optimizer"), stage)
    return DeepSpeedSettings(
        train_batch_size=keys["train_batch_size"],
        micro_batch_size=keys["train_micro_batch_size_per_gpu"],
        stated_accumulation=keys.get("gradient_accumulation_steps"),
        gradient_clipping=float(keys["gradient_clipping"]),
        zero_stage=stage,
        precision=precision,
        optimizer_type=optimizer_type,
        optimizer_params=optimizer_params,
        keys=keys,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _precision(keys: dict[str, Any]) -> str:
    on = [name for name in ("fp16", "bf16") if keys.get(name, {}).get("enabled", False)]
    if len(on) == 2:
        raise UserError("fp16.enabled and bf16.enabled are both true; choose one")
    return on[0] if on else "fp32"


def _zero_stage(section: dict[str, Any], precision: str) -> int:
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage: expected 0, 1, 2 or 3, found {stage!r}")
    if stage == 0 and precision != "fp32":
        raise UserError(
            f"{precision} needs zero_optimization.stage 1 or more: at stage 0 DeepSpeed leaves the loss scale "
            "out (fp16) and starts Adam one step late (bf16)"
        )
    if stage < 3:
        for key in ("offload_param", "super_offload", "stage3_max_live_parameters"):
            if key in section:
                raise UserError(f"zero_optimization.{key}: DeepSpeed ignores it at stage {stage}; it needs stage 3")
    offload = section.get("offload_optimizer", {})
    if offload.get("device") == "nvme" and stage < 3:
        raise UserError(
            f'zero_optimization.offload_optimizer.device: "nvme" is treated as "cpu" at stage {stage}; it needs stage 3'
        )
    if stage == 0 and offload:
        raise UserError(
            "zero_optimization.offload_optimizer: DeepSpeed ignores it at stage 0; it needs stage 1 or more"
        )
    if offload.get("ratio", 1.0) < 1.0 and stage < 3:
        raise UserError(
            f"zero_optimization.offload_optimizer.ratio {offload['ratio']}: below 1 it needs stage 3, found {stage}"
        )
    return stage


def _optimizer(section: Any, stage: int) -> tuple[str, dict[str, Any]]:
    if not isinstance(section, dict) or "type" not in section:
        raise UserError('optimizer: missing; for example {"type": "AdamW", "params": {"lr": 3e-4}}')
    kind = section["type"]
    if kind not in OPTIMIZERS:
        raise UserError(f"optimizer.type: unknown optimizer {kind!r}{nearest(str(kind), OPTIMIZERS)}")
    params = dict(section.get("params", {}))
    valid = {"lr", "weight_decay"} | ({"betas", "eps"} if kind == "AdamW" else {"beta2_decay", "clipping_threshold"})
    for key in params:
        if key not in valid:
            raise UserError(f"optimizer.params.{key}: unknown key{nearest(key, valid)}")
    if not isinstance(params.get("lr"), (int, float)) or params["lr"] <= 0:
        raise UserError(f"optimizer.params.lr: expected a positive number, found {params.get('lr')!r}")
    if kind == "Adafactor" and stage != 0:
        raise UserError(
            f"optimizer.type Adafactor needs zero_optimization.stage 0, found {stage}: ZeRO's flat partition "
            "has no rows and columns, so the second moment would not be factored"
        )
    return kind, params
