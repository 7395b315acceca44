"""DeepSpeed's part of the JSON: its validation, and the values that the trainer reads from it.

DeepSpeed 0.19.8 silently ignores unknown top-level keys, and known keys that do not apply to the run. Here such a key
is an error before anything starts.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from m6.errors import UserError, nearest
from m6.validation import Section, describe, validate

Rate = Annotated[float, Field(ge=0, lt=1)]


class _OptimizerParams(Section):
    lr: PositiveFloat
    weight_decay: float = Field(0.0, ge=0)


class _AdamWParams(_OptimizerParams):
    betas: tuple[Rate, Rate] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class _AdafactorParams(_OptimizerParams):
    beta2_decay: float = Field(-0.8, le=0)
    clipping_threshold: float = Field(1.0, ge=1)


_OPTIMIZER_PARAMS: dict[str, type[_OptimizerParams]] = {"AdamW": _AdamWParams, "Adafactor": _AdafactorParams}
OPTIMIZERS = tuple(_OPTIMIZER_PARAMS)


class _Optimizer(Section):
    type: str
    params: dict[str, Any]


class _TorchAutocast(Section):
    enabled: bool
    # Not float16, which needs a loss scale: DeepSpeed scales only at stage 0, where our clipping expects no scale.
    dtype: Literal["bfloat16"]
    lower_precision_safe_modules: list[str] = Field(default_factory=list)


class _Aio(Section):
    block_size: PositiveInt = 1
    queue_depth: PositiveInt = 1
    intra_op_parallelism: PositiveInt = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class _Keys(Section):
    """The keys that are accepted and passed on to DeepSpeed."""

    train_batch_size: PositiveInt = Field(le=10**9)
    train_micro_batch_size_per_gpu: PositiveInt = Field(le=10**6)
    gradient_accumulation_steps: PositiveInt | None = None
    gradient_clipping: float = Field(ge=0)
    optimizer: _Optimizer
    # DeepSpeed's own models validate these sections, see ``_deepspeed_sections``.
    fp16: dict[str, Any] = Field(default_factory=dict)
    bf16: dict[str, Any] = Field(default_factory=dict)
    torch_autocast: _TorchAutocast | None = None
    zero_optimization: dict[str, Any] = Field(default_factory=dict)
    communication_data_type: Literal["fp16", "bf16", "fp32"] | None = None
    steps_per_print: PositiveInt | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    comms_logger: dict[str, Any] = Field(default_factory=dict)
    aio: _Aio | None = None


PASSED_ON = frozenset(_Keys.model_fields)

_CPU_ADAM = "DeepSpeed accepts it only with its own CPU Adam"
_OWN_CHECKPOINTS = "DeepSpeed's checkpoints are not used; use m6.checkpoint"
_OWN_DATA = "the data pipeline is m6.data"
_OWN_GRADIENTS = "gradients are normalised by the tokens of the global batch"
_OWN_METRICS = "RUN/metrics.jsonl holds every metric"
_UNSUPPORTED = "not supported by the M6 model"

# Keys of DeepSpeed that would be ignored here or would contradict the section "m6", and what to use instead.
REFUSED = {
    "activation_checkpointing": "DeepSpeed does not apply it to the model; use m6.training.activation_checkpointing",
    "amp": "use bf16, fp16 or torch_autocast",
    "bf16.bf16_master_weights_and_grads": _CPU_ADAM,
    "bf16.bf16_optimizer_states": _CPU_ADAM,
    "bf16.check_grad_overflow": "a step with non-finite gradients is always skipped, see m6.training.max_skipped_steps",
    "bf16.immediate_grad_update": "DeepSpeed ignores it at ZeRO stages 1 to 3",
    "checkpoint": "use m6.checkpoint",
    "csv_monitor": _OWN_METRICS,
    "curriculum_learning": _OWN_DATA,
    "data_efficiency": _OWN_DATA,
    "data_types": "gradients have the precision of fp16 or bf16; another type would change DeepSpeed's optimizer",
    "elasticity": "set train_batch_size; the accumulation adapts to the world size",
    "expert_parallel": "use m6.training.ep_size",
    "fp16.auto_cast": "the model casts its inputs itself",
    "fp16.fp16_master_weights_and_grads": _CPU_ADAM,
    "gradient_predivide_factor": _OWN_GRADIENTS,
    "pipeline": _UNSUPPORTED,
    "prescale_gradients": _OWN_GRADIENTS,
    "scheduler": "use m6.schedule",
    "tensor_parallel": _UNSUPPORTED,
    "tensorboard": "use m6.logging.tensorboard",
    "timers": _OWN_METRICS,
    "use_data_before_expert_parallelism": "an expert-parallel group always consists of consecutive ranks",
    "wandb": "use m6.logging.wandb",
    "zero_allow_untested_optimizer": f"the supported optimizers are {' and '.join(OPTIMIZERS)}",
    "zero_force_ds_cpu_optimizer": f"the supported optimizers are PyTorch's {' and '.join(OPTIMIZERS)}",
    "zero_optimization.compute_grad_norm": "the norm is always computed, as a metric and to find non-finite gradients",
    "zero_optimization.cpu_offload": "deprecated; use zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "deprecated; use zero_optimization.offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": "deprecated; use pin_memory in the offload sections",
    "zero_optimization.elastic_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.legacy_stage1": "removed from DeepSpeed",
    "zero_optimization.load_from_fp32_weights": _OWN_CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _OWN_CHECKPOINTS,
    "zero_optimization.zenflow": "our checkpoints cannot hold its state",
}

# Keys of zero_optimization that stages 0 to 2 ignore, in addition to those that begin with stage3_.
STAGE_3_ONLY = {
    "offload_param", "sub_group_size", "zero_hpz_partition_size", "zero_quantized_weights",
    "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "memory_efficient_linear",
    "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module",
}  # fmt: skip
# Keys of zero_optimization.offload_optimizer that stages 0 to 2 ignore.
_STAGE_3_OFFLOAD = {
    "ratio", "super_offload", "cpuadam_cores_perc", "nvme_path", "buffer_count", "pipeline_read", "pipeline_write",
    "fast_init",
}  # fmt: skip


class DeepSpeedSettings(BaseModel):
    """The validated keys of DeepSpeed, and the values that the trainer reads from them.

    Attributes:
        micro_batch_size: samples of one forward pass of a rank.
        stated_accumulation: ``gradient_accumulation_steps`` of the JSON, if it is there.
        gradient_clipping: largest norm of the gradient; 0: no clipping.
        precision: ``fp32``, ``bf16`` or ``fp16``: the type of the weights in the forward pass.
        optimizer_params: the optimizer's parameters, including defaults.
        keys: all keys as they are in the JSON.
    """

    model_config = ConfigDict(frozen=True)

    train_batch_size: int
    micro_batch_size: int
    stated_accumulation: int | None
    gradient_clipping: float
    zero_stage: int
    precision: str
    optimizer_type: str
    optimizer_params: dict[str, Any]
    keys: dict[str, Any]

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches of a rank in one step: train_batch_size / (micro-batch x world size).

        Raises:
            UserError: the batch size is not divisible, or the JSON states another number.
        """
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
        """Raises UserError for expert parallelism at ZeRO stage 3, which DeepSpeed does not support."""
        if ep_size > 1 and self.zero_stage == 3:
            raise UserError(
                f"zero_optimization.stage 3 cannot hold experts split over m6.training.ep_size {ep_size}; "
                "use stage 0, 1 or 2, or ep_size 1"
            )

    def engine_config(self, world_size: int) -> dict[str, Any]:
        """The dictionary for ``deepspeed.initialize``, without the optimizer, which we build ourselves."""
        config = {key: value for key, value in self.keys.items() if key != "optimizer"}
        config["gradient_accumulation_steps"] = self.accumulation_steps(world_size)
        config.setdefault("steps_per_print", None)  # no progress lines of DeepSpeed between ours
        if self.zero_stage == 0:
            # At stage 0 our engine clips the gradients: DeepSpeed does not report the norm there, and leaves the
            # experts of other ranks out of it.
            config["gradient_clipping"] = 0.0
        # Keeps PyTorch's optimizer when its state is offloaded to the host.
        config["zero_force_ds_cpu_optimizer"] = False
        return config

    def check_device(self) -> None:
        """Raises UserError if the device of this machine does not support the run's precision."""
        prepare_deepspeed()
        from deepspeed.accelerator import get_accelerator

        device = get_accelerator()
        supported = {"fp16": device.is_fp16_supported, "bf16": device.is_bf16_supported}
        if self.precision in supported and not supported[self.precision]():
            raise UserError(f"{self.precision}.enabled: the {device.device_name()} of this machine does not support it")


def prepare_deepspeed() -> None:
    """Sets the environment variables that DeepSpeed reads when it is imported: the device and its log level."""
    import torch

    # setdefault: a choice by the user wins.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_LOG_LEVEL", "warning")


def split_deepspeed(keys: dict[str, Any]) -> DeepSpeedSettings:
    """Validates DeepSpeed's keys.

    Raises:
        UserError: a key is unknown, wrong, missing, or would be silently ignored.
    """
    for key in keys:
        _check_accepted(key)
        if key not in PASSED_ON:  # DeepSpeed itself ignores unknown top-level keys
            raise UserError(f"{key}: unknown key{nearest(key, PASSED_ON | {'m6'})}")
    if "gradient_clipping" not in keys:
        raise UserError(
            "gradient_clipping: missing; DeepSpeed's default of 1.0 would clip, so state the value (0: no clipping)"
        )
    settings = validate(_Keys, keys, "")
    stage = _zero_stage(settings.zero_optimization)
    sections = _deepspeed_sections(keys)
    precision = _precision(sections, stage)
    optimizer_params = _optimizer_params(settings.optimizer, stage)
    _check_aio(settings, sections["zero_optimization"])
    return DeepSpeedSettings(
        train_batch_size=settings.train_batch_size,
        micro_batch_size=settings.train_micro_batch_size_per_gpu,
        stated_accumulation=settings.gradient_accumulation_steps,
        gradient_clipping=settings.gradient_clipping,
        zero_stage=stage,
        precision=precision,
        optimizer_type=settings.optimizer.type,
        optimizer_params=optimizer_params,
        keys=keys,
    )


def _check_accepted(key: str) -> None:
    if key in REFUSED:
        raise UserError(f"{key}: not used here: {REFUSED[key]}")


def _deepspeed_sections(keys: dict[str, Any]) -> dict[str, Any]:
    """Parses sections with DeepSpeed's models; later DeepSpeed would report the errors as a traceback on every rank."""
    prepare_deepspeed()
    # DeepSpeed is imported only when it is needed: its import takes seconds.
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models: dict[str, type[BaseModel]] = {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        "zero_optimization": DeepSpeedZeroConfig,
    }
    sections = {}
    for name, model in models.items():
        for key, value in keys.get(name, {}).items():
            _check_accepted(f"{name}.{key}")
            if value == "auto":  # for Hugging Face's Trainer, which fills in the value; DeepSpeed drops the key
                raise UserError(f'{name}.{key}: "auto" would be ignored; write a value, or leave the key out')
        try:
            sections[name] = model(**keys.get(name, {}))
        except pydantic.ValidationError as error:
            raise UserError(describe(error, model, name)) from None
    return sections


def _precision(sections: dict[str, Any], stage: int) -> str:
    enabled = [name for name in ("fp16", "bf16") if sections[name].enabled]
    if len(enabled) == 2:
        raise UserError("fp16.enabled and bf16.enabled are both true; choose one")
    if enabled and stage == 0:
        raise UserError(
            f"{enabled[0]}.enabled needs zero_optimization.stage 1 or more: at stage 0 DeepSpeed does not scale the "
            "loss (fp16) and starts Adam one step late (bf16)"
        )
    return enabled[0] if enabled else "fp32"


def _zero_stage(section: dict[str, Any]) -> int:
    """The ZeRO stage; UserError if the stage ignores a key of the section."""
    stage = section.get("stage", 0)
    # Not isinstance: a bool is an int, and ``true`` must not mean stage 1.
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage: expected 0, 1, 2 or 3, found {stage!r}")
    for key in section:
        if stage < 3 and (key in STAGE_3_ONLY or key.startswith("stage3_")):
            raise UserError(f"zero_optimization.{key}: DeepSpeed ignores it at stage {stage}; it needs stage 3")
        if stage == 0 and key != "stage" and key not in REFUSED:
            raise UserError(f"zero_optimization.{key}: DeepSpeed ignores it at stage 0; it needs stage 1 or more")
    offload = section.get("offload_optimizer")
    if stage < 3 and isinstance(offload, dict):
        for key in offload:
            if key in _STAGE_3_OFFLOAD:
                raise UserError(f"zero_optimization.offload_optimizer.{key}: needs stage 3, found {stage}")
        if offload.get("device") == "nvme":
            raise UserError(
                f'zero_optimization.offload_optimizer.device: "nvme" is treated as "cpu" at stage {stage}; '
                "it needs stage 3"
            )
    return stage


def _optimizer_params(section: _Optimizer, stage: int) -> dict[str, Any]:
    if section.type not in OPTIMIZERS:
        raise UserError(f"optimizer.type: unknown optimizer {section.type!r}{nearest(section.type, OPTIMIZERS)}")
    if section.type == "Adafactor" and stage != 0:
        raise UserError(
            f"optimizer.type Adafactor needs zero_optimization.stage 0, found {stage}: ZeRO's flat partition "
            "has no rows and columns, so the second moment would not be factored"
        )
    return validate(_OPTIMIZER_PARAMS[section.type], section.params, "optimizer.params").model_dump()


def _check_aio(settings: _Keys, zero: Any) -> None:
    offloads = [section.device for section in (zero.offload_optimizer, zero.offload_param) if section is not None]
    if settings.aio is not None and "nvme" not in offloads:
        raise UserError('aio: DeepSpeed ignores it unless zero_optimization offloads to "device": "nvme"')
