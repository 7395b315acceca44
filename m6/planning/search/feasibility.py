"""The feasibility of layouts: whether the code can run them.

A layout can be refused by arithmetic, by the model's features, and by the validation of ``m6 pretrain``. The validation
is called, not repeated: see :func:`m6.planning.search.configuration.configured`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Literal

from m6.config.combinations import EQUAL_SHARES, Run, needs_of
from m6.config.pipeline import ONE_STAGE, PipelineSettings
from m6.config.run import RunConfig
from m6.config.section_checks import check_sharing, cut_between_groups
from m6.errors import UserError
from m6.formatting import markdown_table
from m6.planning.cost.layout import ParallelLayout
from m6.planning.search.configuration import configured

RefusalKind = Literal[
    "batch", "experts", "ranks", "tensor parallelism", "pipeline", "streamed experts", "same as ZeRO 1", "configuration"
]


@dataclass(frozen=True)
class Refusal:
    """The reason against a layout.

    Attributes:
        kind: the category in reports, for counts.
        reason: one clause.
    """

    kind: RefusalKind
    reason: str


# What the arithmetic reads: a search visits each of these with every choice of the rest.
_REST = ("zero_stage", "checkpointing", "offload_optimizer", "offload_params")
_DIVIDED = attrgetter(*(each.name for each in fields(ParallelLayout) if each.name not in _REST))


class Feasibility:
    """Checks whether the code can run layouts of one run.

    The validation of a run takes milliseconds, and a search visits thousands of layouts. Once sizes divide each other,
    the validation does not depend on them. So one answer serves all layouts with equal choices and different sizes.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        # Every call of moe_config validates the settings again. This would be most of the time of a search.
        self._num_experts = 1 if config.m6.moe is None else config.model.moe_config().num_experts
        self._validated: dict[tuple[object, ...], Refusal | None] = {}
        self._equal_for: dict[tuple[int, bool], tuple[str, ...]] = {}
        self._divided: dict[tuple[object, ...], Refusal | None] = {}

    def refusal(self, layout: ParallelLayout, lifted: Collection[RefusalKind] = ()) -> Refusal | None:
        """The first reason against ``layout``, or None.

        A reason of the kind "configuration" may name the sizes of another refused layout. :meth:`explain` names the
        sizes of ``layout``.

        Args:
            lifted: kinds of refusals to ignore, to price features without an implementation.
        """
        layout = self.with_whole_groups(layout)
        found = self._refused_by_model(layout, lifted)
        if found is not None:
            return found
        layout = _without(layout, lifted)
        key: tuple[object, ...] = (
            layout.zero_stage,
            layout.ep_size > 1,
            layout.offload_optimizer,
            layout.offload_params,
            layout.schedule if layout.pp_size > 1 else "",
            layout.tp_size > 1,
            len(set(layout.shares)) > 1,
        )
        if layout.overlap_micro_batches > 1:
            key = (*key, "interleaved", layout.checkpointing)
        if layout.stream_experts:  # m6.offload has conditions of its own
            one_micro_batch = layout.accumulation(self.config.deepspeed.train_batch_size) == 1
            key = (*key, layout.checkpointing, one_micro_batch, layout.pp_size)
        if key not in self._validated:
            self._validated[key] = _refused_by_validation(self.config, layout)
        return self._validated[key]

    def explain(self, layout: ParallelLayout) -> Refusal | None:
        """The first reason against ``layout``, or None, from a validation of this very layout."""
        layout = self.with_whole_groups(layout)
        return self._refused_by_model(layout, ()) or _refused_by_validation(self.config, layout)

    def with_whole_groups(self, layout: ParallelLayout) -> ParallelLayout:
        """``layout``. If layers share weights and its pipeline has no cut: with a cut between groups of these
        layers."""
        sharing = self.config.planned_sharing
        if layout.pipeline is None or layout.cut or sharing is None:
            return layout
        num_stages = layout.pp_size * layout.pipeline.stages_per_rank()
        return replace(layout, cut=tuple(cut_between_groups(num_stages, sharing) or ()))

    def _refused_by_model(self, layout: ParallelLayout, lifted: Collection[RefusalKind]) -> Refusal | None:
        """The refusal by arithmetic or by the model's features, or None."""
        if layout.tp_size > 1 and "tensor parallelism" not in lifted:
            reason = _refused_tensor(self.config, layout)
            if reason is not None:
                return Refusal("tensor parallelism", reason)
        if layout.stream_experts and self.config.expert_store is None and "streamed experts" not in lifted:
            return Refusal(
                "streamed experts",
                "experts are streamed only if the run has the section m6.offload",
            )
        equal_for = self._needs_equal_shares(layout)
        key = equal_for, _DIVIDED(layout)
        if key not in self._divided:
            self._divided[key] = _refused_by_arithmetic(self.config, self._num_experts, layout, equal_for)
        return self._divided[key]

    def _needs_equal_shares(self, layout: ParallelLayout) -> tuple[str, ...]:
        """The reasons for an equal number of micro-batches on all ranks of the layout."""
        key = layout.zero_stage, layout.stream_experts
        if key not in self._equal_for:
            config = self.config
            deepspeed = config.deepspeed.model_copy(update={"zero_stage": layout.zero_stage})
            m6 = config.m6 if layout.stream_experts else config.m6.model_copy(update={"offload": None})
            self._equal_for[key] = needs_of(EQUAL_SHARES, Run(m6, deepspeed, config.model))
        return self._equal_for[key]


def _refused_by_arithmetic(
    config: RunConfig, num_experts: int, layout: ParallelLayout, equal_for: tuple[str, ...]
) -> Refusal | None:
    model = config.model
    if layout.world_size % (layout.tp_size * layout.pp_size) or model.num_attention_heads % layout.tp_size:
        return Refusal("ranks", "tensor- and pipeline-parallel sizes do not divide the ranks or the heads")
    ranks = layout.world_size // (layout.pp_size * layout.outer_parts)
    if ranks % layout.ep_size or num_experts % layout.ep_size:
        of = "data-parallel ranks" if layout.tp_size == 1 else "ranks of a stage"
        return Refusal(
            "experts", f"ep_size {layout.ep_size} does not divide both {ranks} {of} and {num_experts} experts"
        )
    split = layout.batch_split(equal_for)
    # The numbers of micro-batches of a pipeline are checked below.
    refusal = config.batch_sizes.refusal(replace(split, pipeline=None))
    if refusal is not None:
        return Refusal("batch", refusal)
    if layout.pipeline is not None:
        numbers = {share for samples in config.batch_sizes.all for share in split.shares(samples)}
        refusal = _refused_pipeline(layout, layout.pipeline, config, sorted(numbers))
        if refusal is not None:
            return Refusal("pipeline", refusal)
    node, group = layout.ranks_per_node, layout.ep_size
    if node < 0 or (node and max(node, group) % min(node, group)):
        return Refusal("experts", f"ranks_per_node {node} and ep_size {group}: one must be a multiple of the other")
    return None


def _refused_tensor(config: RunConfig, layout: ParallelLayout) -> str | None:
    if layout.tensor is None:
        return "no engine here divides vectors and the matrices of experts"
    if config.m6.moe is not None and config.tensor is None:
        return "with experts the search visits tensor groups only for a run that has m6.parallel.tensor"
    return layout.tensor.refusal(config.model)


def _refused_pipeline(
    layout: ParallelLayout, settings: PipelineSettings, config: RunConfig, numbers: list[int]
) -> str | None:
    if config.pipeline is not None and settings.schedule == ONE_STAGE:
        settings = settings.model_copy(update={"slices": config.pipeline.slices})  # as the layout's JSON has them
    try:
        settings.check_cut(config.model.num_layers)
        if layout.stream_experts and layout.cut:  # without a cut, the search chooses one
            settings.check_experts(config.model)
        if config.planned_sharing is not None:
            check_sharing(settings, config.planned_sharing)
    except UserError as error:
        return str(error)
    return next(filter(None, map(settings.micro_batches_refusal, numbers)), None)


def _refused_by_validation(config: RunConfig, layout: ParallelLayout) -> Refusal | None:
    try:
        found = configured(config, layout)
    except UserError as error:
        return Refusal("configuration", str(error))
    # The layout of the lower stage is the same one.
    return None if found.note_of_stage is None else Refusal("same as ZeRO 1", found.note_of_stage)


def _without(layout: ParallelLayout, lifted: Collection[RefusalKind]) -> ParallelLayout:
    """``layout`` without the lifted features: the validation judges the rest."""
    if "tensor parallelism" in lifted:
        layout = replace(layout, world_size=layout.world_size // layout.tp_size, tp_size=1)
    return replace(layout, stream_experts=False) if "streamed experts" in lifted else layout


def capability_matrix(config: RunConfig) -> str:
    """Markdown: features against ZeRO stages for this run's optimizer and precision, with reasons against them."""
    features: dict[str, dict[str, object]] = {
        "one set of experts": {},
        "experts split": {"ep_size": 2},
        "optimizer on the host": {"offload_optimizer": True},
        "weights on the host": {"offload_params": True},
        "split experts, optimizer on the host": {"ep_size": 2, "offload_optimizer": True},
        "tensor parallel": {"tp_size": 2},
        "pipeline": {"pp_size": 2},
        "streamed experts": {"ep_size": 2, "stream_experts": True},
    }
    feasibility = Feasibility(config)
    reasons: dict[str, int] = {}
    rows = []
    for name, changes in features.items():
        cells = []
        for stage in range(4):
            layout = ParallelLayout(2, zero_stage=stage, **changes)  # type: ignore[arg-type]
            found = feasibility.explain(layout)
            if found is None:
                cells.append("yes")
                continue
            answer = "as stage 1" if found.kind == "same as ZeRO 1" else "no"
            cells.append(f"{answer} [{reasons.setdefault(found.reason, len(reasons) + 1)}]")
        rows.append([name, *cells])
    table = markdown_table(("", *(f"stage {stage}" for stage in range(4))), rows, "lllll")
    return "\n".join([table, "", *(f"[{number}] {reason}" for reason, number in reasons.items())])
