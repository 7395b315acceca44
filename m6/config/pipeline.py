"""The sections ``m6.parallel`` and ``m6.parallel.pipeline``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveInt

from m6.architecture.settings import ModelSettings
from m6.config.tensor import TensorSettings
from m6.errors import UserError
from m6.validation import Section

Schedule = Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
V_SCHEDULES = ("zbv", "dualpipev")
ONE_STAGE: Schedule = "1f1b"
"""The only schedule with one stage on each rank. Slices, and pipelines without a flush, need it."""


class PipelineSettings(Section):
    """Divides the layers into stages, through which micro-batches pass from rank to rank."""

    num_ranks: int = Field(ge=2, description="ranks of a pipeline; divides the world size")
    schedule: Schedule = Field(
        "1f1b",
        description="order of forward and backward passes; 1f1b has one stage on each rank, zbv and dualpipev have "
        "two, the interleaved ones two or what `layers` says",
    )
    layers: list[PositiveInt] | None = Field(
        None,
        min_length=2,
        description="number of layers of each stage, in the order of the model; absent: equal ones, as far as possible",
    )
    slices: Annotated[int, Field(ge=2)] | Literal["auto"] | None = Field(
        None,
        description='slices of about equal length into which rows are cut where attention allows it; "auto": of equal '
        "time by a model; absent: rows are whole. Only for 1f1b",
    )

    @property
    def is_v(self) -> bool:
        """Whether the first and the last stage are on the first rank."""
        return self.schedule in V_SCHEDULES

    def stages_per_rank(self) -> int:
        """The number of stages of each rank."""
        if self.schedule == ONE_STAGE:
            return 1
        if self.is_v or self.layers is None:
            return 2
        return len(self.layers) // self.num_ranks

    def cut(self, num_layers: int) -> list[range]:
        """The layers of each stage of a model with ``num_layers`` layers, in the order of the model."""
        sizes = self.layers or equal_sizes(num_layers, self.num_ranks * self.stages_per_rank())
        ends = itertools.accumulate(sizes)
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The numbers of the stages on a rank of the pipeline."""
        if self.is_v:
            return [pipeline_rank, 2 * self.num_ranks - 1 - pipeline_rank]
        return [pipeline_rank + self.num_ranks * index for index in range(self.stages_per_rank())]

    def layers_of(self, pipeline_rank: int, num_layers: int) -> set[int]:
        """The layers on a rank of the pipeline."""
        cut = self.cut(num_layers)
        return {layer for stage in self.stages_of(pipeline_rank) for layer in cut[stage]}

    def describe_rank(self, pipeline_rank: int, num_layers: int) -> str:
        """The stages and layers on a rank of the pipeline, such as "stages 0 and 3, layers 0-1 and 6-7"."""
        cut, stages = self.cut(num_layers), self.stages_of(pipeline_rank)
        layers = [
            f"{cut[stage][0]}-{cut[stage][-1]}" if len(cut[stage]) > 1 else str(cut[stage][0]) for stage in stages
        ]
        numbers = " and ".join(map(str, stages))
        return f"stage{'s' if len(stages) > 1 else ''} {numbers}, layers {' and '.join(layers)}"

    def describe(self, num_layers: int) -> str:
        """The pipeline in words."""
        sizes = ", ".join(str(len(layers)) for layers in self.cut(num_layers))
        text = f"pipeline of {self.num_ranks} ranks, {self.schedule}: stages of {sizes} layers"
        return text if self.slices is None else f"{text}; rows in slices ({self.slices}), each with its own dropout"

    def check_cut(self, num_layers: int) -> None:
        """Raises UserError if the stages do not fit the schedule and the model."""
        name, size, per_rank = "m6.parallel.pipeline", self.num_ranks, self.stages_per_rank()
        if self.layers is not None:
            expected, fits = f"{per_rank * size} numbers", len(self.layers) == per_rank * size
            if self.schedule.startswith("interleaved"):
                expected, fits = f"{2 * size} numbers, or more in steps of {size}", fits and per_rank > 1
            if not fits:
                raise UserError(
                    f'{name}.layers {self.layers}: expected {expected} for "schedule": "{self.schedule}" on {size} '
                    f"ranks, found {len(self.layers)}"
                )
        if per_rank * size > num_layers:
            advice = f"num_ranks {num_layers // per_rank}" if num_layers >= 2 * per_rank else "more layers"
            raise UserError(
                f'{name}: num_ranks {size} with "schedule": "{self.schedule}" makes {per_rank * size} stages, but '
                f"m6.model.num_layers is {num_layers}: a stage would have no layer; use {advice}"
                f"""{' or "schedule": "1f1b"' if per_rank > 1 else ""}"""
            )
        if self.layers is not None and sum(self.layers) != num_layers:
            raise UserError(
                f"{name}.layers {self.layers} has {sum(self.layers)} layers, but m6.model.num_layers is "
                f"{num_layers}; use {equal_sizes(num_layers, len(self.layers))}, or leave it out"
            )

    def check_experts(self, model: ModelSettings) -> None:
        """Raises UserError if a rank has no layer with experts to offload."""
        cut = self.cut(model.num_layers)
        for rank in range(self.num_ranks):
            layers = [layer for stage in self.stages_of(rank) for layer in cut[stage]]
            if not any(map(model.is_moe_layer, layers)):
                raise UserError(
                    f"m6.offload: rank {rank} of m6.parallel.pipeline has layers {layers}, none of which has experts "
                    f"(m6.model.moe_layer_frequency {model.moe_layer_frequency}); give it one by "
                    "m6.parallel.pipeline.layers, or use fewer ranks"
                )

    def check_adapters(self, targets: Sequence[str], model: ModelSettings) -> None:
        """Raises UserError if a stage has no adapter: nothing in it would train, nor give a gradient to a stage before.

        Args:
            targets: of ``m6.lora``.
        """
        for number, layers in enumerate(self.cut(model.num_layers)):
            kinds = {"experts" if model.is_moe_layer(layer) else "dense" for layer in layers} | {"attention"}
            if not kinds & set(targets):
                raise UserError(
                    f"m6.lora.targets {', '.join(targets)}: stage {number} of m6.parallel.pipeline has layers "
                    f'{layers[0]} to {layers[-1]}, none of which has such matrices; add "attention", or give the '
                    "stage such a layer by m6.parallel.pipeline.layers"
                )

    def micro_batches_refusal(self, micro_batches: int) -> str | None:
        """Why a pipeline cannot run this number of micro-batches in a step, and the nearest number; None if it can."""
        if self.slices is not None:
            return None
        least = (2 if self.is_v else 1) * self.num_ranks
        what = f'"schedule": "{self.schedule}" on {self.num_ranks} ranks'
        if micro_batches < least:
            factor = "2 x " if self.is_v else ""
            return (
                f"{what} needs {least} micro-batches or more in a step ({factor}num_ranks), but each pipeline has "
                f"{micro_batches}"
            )
        rounds = micro_batches // self.num_ranks
        if self.schedule.startswith("interleaved") and micro_batches % rounds:
            return (
                f"{what} needs a multiple of {rounds} micro-batches in a step, as many as rounds of the ranks, but "
                f"each pipeline has {micro_batches}"
            )
        return None


class ParallelSettings(Section):
    """How the model is divided over ranks, besides ``m6.training.ep_size``."""

    pipeline: PipelineSettings | None = Field(
        None, description="stages of layers on different ranks; absent: each rank has all layers"
    )
    tensor: TensorSettings | None = Field(
        None, description="matrices divided over ranks; absent: each rank has whole matrices"
    )
    shares: list[PositiveInt] | None = Field(
        None,
        min_length=2,
        description="micro-batches of a step on each rank that reads its own, such as [3, 1]; a shorter list is for "
        "equal blocks of neighbouring ranks. Batches of other sizes are divided in proportion; absent: as "
        "equal as the batch allows",
    )


def equal_sizes(num_layers: int, stages: int) -> list[int]:
    """The numbers of layers of stages of equal length, as far as possible."""
    bounds = [num_layers * stage // stages for stage in range(stages + 1)]
    return [end - begin for begin, end in itertools.pairwise(bounds)]
