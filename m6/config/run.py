"""The JSON of a run: DeepSpeed's keys at the top level, all other keys under ``"m6"``.

Each value stands in one place: batch sizes, precision, clipping and the optimizer are DeepSpeed's keys; the model,
the data and the schedule are in ``"m6"``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m6.architecture.settings import MODEL_TYPE, ModelSettings
from m6.architecture.sharing import Sharing
from m6.config.batch_ramp import BatchSizes
from m6.config.combinations import EQUAL_SHARES, WHOLE_GRADIENTS, Run, check_combinations, needs_of
from m6.config.deepspeed import DeepSpeedSettings, split_deepspeed
from m6.config.offload import OffloadSettings
from m6.config.pipeline import PipelineSettings
from m6.config.section_checks import (
    apply_offload,
    check_batch_ramp,
    check_elastic,
    check_gradient_delay,
    check_lora,
    check_offload,
    check_overlap,
    check_pictures,
    check_pipeline,
    check_pseudo_to_real,
    check_schedule,
    check_sharing,
)
from m6.config.sections import M6Settings
from m6.config.shares import BatchSplit
from m6.config.tensor import TensorSettings, check_tensor
from m6.errors import UserError, closest
from m6.renamed import with_new_keys
from m6.shipped import shipped_file
from m6.validation import check_keys, read_document, validate

if TYPE_CHECKING:
    from moe.expectation import ExpectedRouting


@dataclass(frozen=True)
class RunConfig:
    """The validated configuration of a run.

    Attributes:
        m6: the section ``"m6"``.
        deepspeed: DeepSpeed's keys.
        model: the model's settings, made of ``m6.model`` and ``m6.moe``.
        document: the JSON with overrides applied, which RUN/config.json records.
    """

    m6: M6Settings
    deepspeed: DeepSpeedSettings
    model: ModelSettings
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

    @property
    def expected_routing(self) -> ExpectedRouting | None:
        """What the capacity leaves over of the choices of a micro-batch without padding; None: the model is dense.

        The router is taken to be balanced, see ``moe.expectation``.
        """
        if self.model.moe is None:
            return None
        from moe.expectation import expected_routing  # with torch

        tokens = self.deepspeed.micro_batch_size * self.m6.data.sequence_length
        return expected_routing(self.model.moe_config(), tokens)

    def data_size(self, world_size: int) -> int:
        """Groups of ranks that read different micro-batches."""
        return world_size // (self.pipeline_size * self.tensor_size)

    @property
    def is_asynchronous(self) -> bool:
        """Whether a pipeline goes on from step to step, see ``flushes_after``."""
        return self.pipeline is not None and self.m6.gradient_delay is not None

    def flushes_after(self, step: int) -> bool:
        """Whether an asynchronous pipeline ends all passes of the first ``step`` steps before the next one begins.

        It does where the run looks at the model or at its losses.
        """
        m6, switch = self.m6, self.m6.pseudo_to_real
        intervals = [section.interval_steps for section in (m6.logging, m6.evaluation, m6.checkpoint)]
        if m6.training.check_replicas_interval_steps is not None:
            intervals.append(m6.training.check_replicas_interval_steps)
        ends = {m6.training.total_steps, None if switch is None else switch.switch_step}
        return step in ends or any(step % interval == 0 for interval in intervals)

    def batch_split(self, world_size: int) -> BatchSplit:
        """How the micro-batches of a step are divided over ranks."""
        shares = self.m6.parallel.shares
        return BatchSplit(
            micro_batch_size=self.deepspeed.micro_batch_size,
            ranks=self.data_size(world_size),
            ep_size=self.m6.training.ep_size,
            tensor_size=self.tensor_size,
            at_once=self.m6.training.overlap_micro_batches,
            stated=None if shares is None else tuple(shares),
            pipeline=self.pipeline,
            equal_for=needs_of(EQUAL_SHARES, Run(self.m6, self.deepspeed, self.model)),
            accumulation=self.deepspeed.stated_accumulation,
        )

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches in a step of the whole batch, of the rank with most of them."""
        return self.batch_split(world_size).most(self.deepspeed.train_batch_size)

    def backward_passes(self, world_size: int) -> int:
        """Backward passes of a rank in such a step: of single or of interleaved micro-batches."""
        return self.accumulation_steps(world_size) // self.m6.training.overlap_micro_batches

    @property
    def ranks_per_part(self) -> int:
        """Neighbouring ranks that share a contiguous part of a step, see ``m6.training.train_step``."""
        return 1 if self.m6.training.deterministic is None else self.m6.training.ep_size

    @property
    def sums_depend_on(self) -> dict[str, Any] | None:
        """What must stay as it is for equal sums on any number of ranks, as JSON; None if the run does not ask for
        them."""
        training, parallel = self.m6.training, self.m6.parallel
        if training.deterministic is None:
            return None
        found: dict[str, Any] = {
            "m6.training.ep_size": training.ep_size,
            "train_micro_batch_size_per_gpu": self.deepspeed.micro_batch_size,
            "m6.training.overlap_micro_batches": training.overlap_micro_batches,
        }
        for name, section in (("pipeline", parallel.pipeline), ("tensor", parallel.tensor)):
            found[f"m6.parallel.{name}"] = None if section is None else section.model_dump(mode="json")
        return found

    @property
    def note_of_stage(self) -> str | None:
        """Why the run has the memory of another ZeRO stage than its JSON says; None if it has not."""
        stated = self.document.get("zero_optimization", {}).get("stage", 0)
        if stated == self.deepspeed.zero_stage:
            return None
        reasons = " and ".join(needs_of(WHOLE_GRADIENTS, Run(self.m6, self.deepspeed, self.model)))
        return f"zero_optimization.stage {stated} keeps whole gradients, as stage 1 does: {reasons}"

    @property
    def planned_sharing(self) -> Sharing | None:
        """What the layers share in the Pseudo phase; None if the run has none."""
        settings = self.m6.pseudo_to_real
        return None if settings is None else settings.sharing(self.model.num_layers)

    @property
    def last_sharing(self) -> Sharing | None:
        """What the layers share when the job ends: nothing, unless it ends at the switch of the Pseudo phase."""
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
        document, warnings = with_new_keys(document)
        config = parse_config(document)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if os.environ.get("RANK", "0") == "0":
        for warning in warnings:
            print(f"warning: {path}: {warning}", file=sys.stderr)
    return config


def parse_config(document: dict[str, Any]) -> RunConfig:
    """Validates the JSON of a run.

    Raises:
        UserError: a key or value is wrong, or two of them contradict each other; the message names them.
    """
    if document.get("model_type") == MODEL_TYPE:
        raise UserError("belongs to an exported model; expected the JSON or the folder of a run")
    if "m6" not in document:
        check_keys((key for key in document if closest(key, {"m6"}) is not None), {"m6"}, "")
        raise UserError('the section "m6" is missing: it holds the model, the data and the schedule')
    deepspeed = split_deepspeed({key: value for key, value in document.items() if key != "m6"})
    settings = validate(M6Settings, document["m6"], "m6")
    model = _model_settings(settings)
    if settings.training.ep_size > 1 and settings.moe is None:
        raise UserError(
            f"m6.training.ep_size is {settings.training.ep_size} but the model is dense; add m6.moe or leave it at 1"
        )
    if settings.offload is not None:
        checkpointing = settings.training.activation_checkpointing
        # The checks need DeepSpeed's settings with the offload that the section adds.
        deepspeed = apply_offload(settings.offload, deepspeed, model)
        check_offload(settings.offload, deepspeed, model, checkpointing)
    check_combinations(settings, deepspeed, model)
    if deepspeed.zero_stage == 2 and needs_of(WHOLE_GRADIENTS, Run(settings, deepspeed, model)):
        deepspeed = deepspeed.at_stage_1()
    if settings.data.sequence_length > model.max_position_embeddings:
        raise UserError(
            f"m6.data.sequence_length {settings.data.sequence_length} exceeds m6.model.max_position_embeddings "
            f"{model.max_position_embeddings}"
        )
    if settings.moe is not None:
        check_overlap(settings, deepspeed, model)
    settings.communication.check()
    if settings.gradient_delay is not None:
        check_gradient_delay(settings.gradient_delay, settings, deepspeed)
    if settings.training.batch_ramp:
        check_batch_ramp(settings, deepspeed)
    check_schedule(settings.schedule, settings.training.total_steps)
    if settings.pseudo_to_real is not None:
        check_pseudo_to_real(settings.pseudo_to_real, model, settings)
    if settings.lora is not None:
        check_lora(settings.lora, model, settings)
    if settings.elastic is not None:
        check_elastic(settings.elastic, settings, deepspeed)
    check_pictures(settings)
    if settings.parallel.pipeline is not None:
        check_pipeline(settings.parallel.pipeline, settings, model)
    if settings.parallel.tensor is not None:
        check_tensor(settings.parallel.tensor, model)
    config = RunConfig(m6=settings, deepspeed=deepspeed, model=model, document=document)
    if config.pipeline is not None and config.planned_sharing is not None:
        check_sharing(config.pipeline, config.planned_sharing)
    return config


def _model_settings(settings: M6Settings) -> ModelSettings:
    check_keys(settings.model, {field.name for field in fields(ModelSettings)} - {"moe"}, "m6.model")
    try:
        return ModelSettings(**settings.model, moe=settings.moe)
    except (ValueError, TypeError) as error:
        # Errors of the mixture of experts begin with the name of its section.
        raise UserError(f"m6.{error}" if str(error).startswith("moe.") else f"m6.model: {error}") from None
