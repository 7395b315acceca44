"""The JSON of a run: DeepSpeed's keys at the top level, all other keys under ``"m6"``.

Each value stands in one place: batch sizes, precision, clipping and the optimizer are DeepSpeed's keys; the model,
the data and the schedule are in ``"m6"``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from m6.architecture.configuration import M6Config
from m6.architecture.sharing import Sharing
from m6.config.batch_ramp import BatchSizes
from m6.config.communication import check_communication
from m6.config.deepspeed import DeepSpeedSettings, split_deepspeed
from m6.config.elastic import ElasticSettings
from m6.config.gradient_delay import check_gradient_delay
from m6.config.offload import OffloadSettings
from m6.config.offload_checks import apply_offload, check_offload
from m6.config.pipeline import PipelineSettings, check_pipeline
from m6.config.pipeline_sharing import check_sharing
from m6.config.pseudo_to_real import check_pseudo_to_real
from m6.config.sections import LoraSettings, M6Settings, ScheduleSettings
from m6.config.tensor import TensorSettings, check_tensor
from m6.config.turns import check_turns
from m6.data.objectives import OBJECTIVES, reads_codes
from m6.errors import UserError
from m6.shipped import shipped_file
from m6.validation import check_keys, read_document, validate


@dataclass(frozen=True)
class RunConfig:
    """The validated configuration of a run.

    Attributes:
        m6: the section ``"m6"``.
        deepspeed: DeepSpeed's keys.
        model: the model's configuration, made of ``m6.model`` and ``m6.moe``.
        document: the JSON with overrides applied, which RUN/config.json records.
    """

    m6: M6Settings
    deepspeed: DeepSpeedSettings
    model: M6Config
    document: dict[str, Any]

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch of each step."""
        return BatchSizes(self.m6.training.batch_ramp, self.deepspeed.train_batch_size)

    @property
    def expert_store(self) -> OffloadSettings | None:
        """The settings of offloaded experts; None if there are none, also if DeepSpeed does the offloading."""
        settings = self.m6.offload
        return None if settings is None or settings.policy == "deepspeed" else settings

    @property
    def pipeline(self) -> PipelineSettings | None:
        """The stages of layers on different ranks; None if each rank has all layers."""
        return self.m6.parallel.pipeline

    @property
    def pipeline_size(self) -> int:
        """Ranks that together hold one copy of the layers, and read the same micro-batches."""
        return 1 if self.pipeline is None else self.pipeline.num_ranks

    @property
    def tensor(self) -> TensorSettings | None:
        """How matrices are divided over ranks; None if each rank has whole ones."""
        return self.m6.parallel.tensor

    @property
    def tensor_size(self) -> int:
        """Ranks that together hold one copy of each divided matrix, and read the same micro-batches."""
        return 1 if self.tensor is None else self.tensor.num_ranks

    def data_size(self, world_size: int) -> int:
        """Groups of ranks that read different micro-batches."""
        return world_size // (self.pipeline_size * self.tensor_size)

    @property
    def is_flushless(self) -> bool:
        """Whether a pipeline goes on from step to step, see ``flushes_after``."""
        return self.pipeline is not None and self.m6.gradient_delay is not None

    def flushes_after(self, step: int) -> bool:
        """Whether a flushless pipeline ends all passes of the first ``step`` steps before the next one begins.

        It does where the run looks at the model or at its losses.
        """
        m6, switch = self.m6, self.m6.pseudo_to_real
        intervals = (section.interval_steps for section in (m6.logging, m6.evaluation, m6.checkpoint))
        ends = {m6.training.total_steps, None if switch is None else switch.switch_step}
        return step in ends or any(step % interval == 0 for interval in intervals)

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches of a rank in one step; UserError if the batch is not divisible by all of them."""
        return self.deepspeed.accumulation_steps(self.data_size(world_size))

    def backward_passes(self, world_size: int) -> int:
        """Backward passes of a rank in one step: of micro-batches, or of those that take turns."""
        return self.accumulation_steps(world_size) // self.m6.training.micro_batches_at_once

    @property
    def ranks_per_part(self) -> int:
        """Neighbouring ranks that share a contiguous part of a step, see ``m6.training.train_step``."""
        return 1 if self.m6.training.deterministic is None else self.m6.training.ep_size

    @property
    def sums_depend_on(self) -> dict[str, int] | None:
        """What must stay as it is for equal sums on any number of ranks; None if the run does not ask for them."""
        if self.m6.training.deterministic is None:
            return None
        sizes = {"m6.training.ep_size": self.m6.training.ep_size}
        return {**sizes, "train_micro_batch_size_per_gpu": self.deepspeed.micro_batch_size}

    @property
    def planned_sharing(self) -> Sharing | None:
        """What the layers share in the Pseudo stage; None if the run has none."""
        settings = self.m6.pseudo_to_real
        return None if settings is None else settings.sharing(self.model.num_layers)

    @property
    def last_sharing(self) -> Sharing | None:
        """What the layers share when the job ends: nothing, unless it ends at the switch of the Pseudo stage."""
        settings = self.m6.pseudo_to_real
        return self.planned_sharing if settings is not None and settings.stop_at_switch else None


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Reads and validates a run's JSON.

    Args:
        path: the JSON file, or the name of a shipped one.
        overrides: ``key.path=value`` strings; the value is JSON, or else a plain string.

    Raises:
        UserError: the file is missing, is not JSON, or has a wrong key or value; the message names it.
    """
    path = shipped_file(path, "configuration")
    return parse_document(path, read_document(path, overrides))


def parse_document(path: Path, document: dict[str, Any]) -> RunConfig:
    """Validates the JSON of a run; error messages begin with ``path``, the file it was read from."""
    try:
        return parse_config(document)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse_config(document: dict[str, Any]) -> RunConfig:
    """Validates the JSON of a run.

    Raises:
        UserError: a key or value is wrong, or two of them contradict each other; the message names them.
    """
    if "m6" not in document:
        raise UserError('the section "m6" is missing: it holds the model, the data and the schedule')
    deepspeed = split_deepspeed({key: value for key, value in document.items() if key != "m6"})
    settings = validate(M6Settings, document["m6"], "m6")
    model = _model_config(settings)
    if settings.training.ep_size > 1 and settings.moe is None:
        raise UserError(
            f"m6.training.ep_size is {settings.training.ep_size} but the model is dense; add m6.moe or leave it at 1"
        )
    deepspeed.check_experts(settings.training.ep_size)
    if settings.offload is not None:
        switch = None if settings.pseudo_to_real is None else settings.pseudo_to_real.switch
        checkpointing = settings.training.activation_checkpointing
        # The checks need DeepSpeed's settings with the offload that the section adds.
        deepspeed = apply_offload(settings.offload, deepspeed, model)
        check_offload(settings.offload, deepspeed, model, switch, checkpointing)
    if settings.data.sequence_length > model.max_position_embeddings:
        raise UserError(
            f"m6.data.sequence_length {settings.data.sequence_length} exceeds m6.model.max_position_embeddings "
            f"{model.max_position_embeddings}"
        )
    if settings.moe is not None:
        _check_overlap(settings, deepspeed, model)
    if settings.training.micro_batches_at_once > 1:
        check_turns(settings, model)
    if settings.training.deterministic is not None:
        _check_deterministic(settings, deepspeed)
    check_communication(settings, deepspeed)
    if settings.gradient_delay is not None:
        check_gradient_delay(settings.gradient_delay, settings, deepspeed)
    if settings.training.batch_ramp:
        _check_batch_ramp(settings, deepspeed)
    _check_schedule(settings.schedule, settings.training.total_steps)
    if settings.pseudo_to_real is not None:
        check_pseudo_to_real(settings.pseudo_to_real, model, settings)
    if settings.lora is not None:
        _check_lora(settings.lora, model, settings)
    if settings.elastic is not None:
        _check_elastic(settings.elastic, settings, deepspeed)
    _check_pictures(settings)
    if settings.parallel.pipeline is not None:
        check_pipeline(settings.parallel.pipeline, settings, deepspeed, model)
    if settings.parallel.tensor is not None:
        check_tensor(settings.parallel.tensor, settings, deepspeed, model)
    config = RunConfig(m6=settings, deepspeed=deepspeed, model=model, document=document)
    if config.pipeline is not None and config.planned_sharing is not None:
        check_sharing(config.pipeline, config.planned_sharing)
    return config


def _check_overlap(settings: M6Settings, deepspeed: DeepSpeedSettings, model: M6Config) -> None:
    parts = model.moe_config().exchange_parts(settings.training.ep_size)
    length, rows = settings.data.sequence_length, deepspeed.micro_batch_size
    tokens = "one token" if rows * length == 1 else f"{rows * length} tokens"
    if parts > rows * length:
        raise UserError(
            f"m6.moe.overlap_parts {parts}: a micro-batch of train_micro_batch_size_per_gpu {rows} x "
            f"m6.data.sequence_length {length} has at most {tokens}, too few for one in each part; use "
            f"train_micro_batch_size_per_gpu {-(-parts // length)} or more, or overlap_parts {rows * length}"
        )
    if parts > 1 and settings.offload is not None and settings.offload.update == "backward":
        raise UserError(
            f'm6.moe.overlap_parts {parts}: "update": "backward" of m6.offload needs one gradient per expert and step, '
            'but each part gives one; use overlap_parts 1 or "update": "next_forward"'
        )


def _check_deterministic(settings: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    name = 'm6.training.deterministic "any_world"'
    if deepspeed.zero_stage > 1:
        raise UserError(
            f"{name}: zero_optimization.stage {deepspeed.zero_stage} adds up gradients in an order that depends on the "
            "number of ranks; use stage 1 or 0"
        )
    if "offload_optimizer" in deepspeed.keys.get("zero_optimization", {}):
        raise UserError(
            f"{name}: with zero_optimization.offload_optimizer DeepSpeed adds up gradients in host memory, in an order "
            "that depends on the number of ranks; leave it out, or offload experts with m6.offload"
        )
    if deepspeed.optimizer_type in ("Lamb", "Lars") and deepspeed.zero_stage == 1:
        raise UserError(
            f"{name}: at zero_optimization.stage 1 optimizer.type {deepspeed.optimizer_type} adds up norms of the "
            "parts of tensors, which other numbers of ranks cut elsewhere; use stage 0"
        )
    if settings.offload is not None and settings.offload.update == "backward":
        raise UserError(
            f'{name}: m6.offload.update "backward" uses each gradient at once and keeps none to add up in order; use '
            '"next_forward"'
        )
    if settings.moe is not None and settings.moe.get("balance_scope") == "global_batch":
        raise UserError(
            f'{name}: m6.moe.balance_scope "global_batch" balances the micro-batches that all ranks compute at the '
            'same time, which are others on another number of ranks; use "micro_batch"'
        )
    if settings.pseudo_to_real is not None and settings.pseudo_to_real.switch == "gradient_correlation":
        raise UserError(
            f'{name}: m6.pseudo_to_real.switch "gradient_correlation" measures the gradients of one rank; use '
            '"step" or "loss_plateau"'
        )


def _check_batch_ramp(settings: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    name = "m6.training.batch_ramp"
    BatchSizes(settings.training.batch_ramp, deepspeed.train_batch_size).check(settings.training.total_steps)
    if settings.training.deterministic is not None:
        raise UserError(
            f'{name}: "deterministic": "any_world" has one tree of sums for all steps; leave one of them out'
        )
    if settings.offload is not None:
        raise UserError(f"{name}: m6.offload plans the memory of one number of micro-batches; leave one of them out")
    if "offload_optimizer" in deepspeed.keys.get("zero_optimization", {}):
        raise UserError(
            f"{name}: DeepSpeed's offload_optimizer is made for one number of micro-batches; leave one of them out"
        )


def _check_schedule(schedule: ScheduleSettings, total: int) -> None:
    room = total - (schedule.decay_steps(total) if schedule.decay_share is not None else 0)
    if schedule.warmup_steps > room:
        decay = f" and a decay of {total - room} steps, decay_share {schedule.decay_share:g}," if room < total else ""
        raise UserError(
            f"m6.schedule: warmup_steps {schedule.warmup_steps}{decay} exceed m6.training.total_steps {total}; "
            f"set m6.schedule.warmup_steps=0 to {room}, or more m6.training.total_steps"
        )
    if (schedule.decay == "wsd") != (schedule.decay_share is not None):
        raise UserError(
            f'm6.schedule.decay_share belongs to "decay": "wsd" and is required there; decay is "{schedule.decay}"'
        )
    for key, has_effect in (
        ("power", schedule.decay == "polynomial"),
        ("final_lr_ratio", schedule.decay != "constant"),
    ):
        if key in schedule.model_fields_set and not has_effect:
            raise UserError(f'm6.schedule.{key}: "decay": "{schedule.decay}" ignores it; leave it out')


def _check_lora(settings: LoraSettings, model: M6Config, run: M6Settings) -> None:
    if run.init is None:
        raise UserError("m6.lora: adapters belong to weights that are trained already; use m6 finetune with --init")
    if run.offload is not None:
        raise UserError("m6.lora: the experts of m6.offload are trained, but beside adapters all weights are frozen")
    if "dense" in settings.targets and model.num_moe_layers == model.num_layers:
        raise UserError('m6.lora.targets: "dense", but the feed-forwards of all layers are experts; use "experts"')
    if "experts" in settings.targets and not model.num_moe_layers:
        raise UserError('m6.lora.targets: "experts", but the model is dense; use "dense"')
    if "experts" not in settings.targets and run.training.ep_size > 1:
        # DeepSpeed 0.19.8 demands a trained expert on each rank where experts are divided.
        raise UserError(
            f'm6.lora.targets: m6.training.ep_size is {run.training.ep_size}, which needs "experts" among them'
        )


def _check_elastic(settings: ElasticSettings, run: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    if "gradient_accumulation_steps" in deepspeed.keys:
        raise UserError(
            "gradient_accumulation_steps: with m6.elastic it follows from the batch sizes and the ranks of each "
            "attempt; leave it out"
        )
    for name in ("ep_size", "pipeline"):
        if run.training.deterministic is not None and name in (settings.may_change or ()):
            raise UserError(
                f'm6.elastic.may_change: "{name}" changes the sums that m6.training.deterministic "any_world" keeps; '
                "leave it out"
            )


def _check_pictures(settings: M6Settings) -> None:
    drawing = [name for name in OBJECTIVES if reads_codes(name)]
    trained = [name for name in drawing if settings.objectives.of(name).weight > 0]
    if trained and settings.data.image_tokenizer is None:
        raise UserError(f"m6.objectives.{trained[0]} needs m6.data.image_tokenizer, whose codes it learns to generate")
    if settings.data.image_tokenizer is not None and not trained:
        raise UserError(
            f"m6.data.image_tokenizer: only m6.objectives.{' and '.join(drawing)} read image codes, and their weights "
            "are 0; give one a weight, or leave the image tokenizer out"
        )
    if settings.samples is not None and not trained:
        raise UserError(
            f"m6.samples: only a model with m6.objectives.{' or '.join(drawing)} draws pictures; their weights are 0"
        )


def _model_config(settings: M6Settings) -> M6Config:
    # Not the fields that M6Config inherits from transformers: they are no settings of a run.
    names = {field.name for field in fields(M6Config) if field.name in M6Config.__annotations__} - {"moe"}
    check_keys(settings.model, names, "m6.model")
    try:
        return M6Config(**settings.model, moe=settings.moe)
    except (ValueError, TypeError) as error:
        # Errors of the mixture of experts begin with the name of its section.
        raise UserError(f"m6.{error}" if str(error).startswith("moe.") else f"m6.model: {error}") from None
