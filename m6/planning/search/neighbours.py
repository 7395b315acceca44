"""Further parts of a report: the neighbours of a plan, and the needs of a run without a fitting layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from m6.architecture.communication_volume import PLACEMENTS
from m6.config.checks import check_world_size
from m6.config.offload import UPDATE_NO_OFFLOADED, OffloadOptimizer, OffloadSettings
from m6.config.pipeline import SCHEDULES
from m6.config.run import RunConfig, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout, divisors
from m6.planning.machine.cluster import Cluster
from m6.planning.search.configuration import configure
from m6.planning.search.feasibility import RefusalKind
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, Rejection


def neighbours(planner: Planner, plan: PricedLayout) -> list[Rejection]:
    """Every layout with one choice different from ``plan``, with the reason against it."""
    found = []
    for name, values in _other_values(planner, plan.layout):
        for value in values:
            changed = replace(plan.layout, **{"cut": (), "shares": (), name: value})
            if name != "ranks_per_node":  # the best exchange depends on the other choices
                changed = planner.time.exchange.faster(replace(changed, ranks_per_node=0))
            if plan.layout.shares and changed.pp_size == 1:
                changed = planner.time.balanced(changed)
            judged = planner.evaluate(changed)
            if isinstance(judged, PricedLayout):
                ratio = judged.time.total / plan.time.total - 1
                reason = f"{ratio:+.1%} step time" if abs(ratio) >= 5e-4 else "as fast, less simple"
                judged = Rejection(changed, "slower", reason)
            found.append(replace(judged, reason=f"{name} {value}: {judged.reason}"))
    return found


def _other_values(planner: Planner, layout: ParallelLayout) -> Iterator[tuple[str, list[Any]]]:
    """Other values of each choice: the next divisors of sizes, all other values of the rest."""
    config, per_domain = planner.config, planner.time.nodes.devices_per_domain
    rows, experts = config.deepspeed.train_batch_size, 1
    if config.m6.moe is not None:
        experts = config.model.moe_config().num_experts
    sizes = {"ep_size": math.gcd(layout.dp_size, experts), "micro_batch_size": rows // layout.dp_size}
    axes: dict[str, list[Any]] = {
        name: _adjacent_divisors(getattr(layout, name), number) for name, number in sizes.items()
    }
    axes |= {"zero_stage": list(range(4)), "tp_size": [1, 2]}
    if layout.tp_size > 1:
        axes["placement"] = list(PLACEMENTS)
    if planner.cluster.num_devices > 1:
        axes["pp_size"] = sorted({1, *_adjacent_divisors(layout.pp_size, planner.cluster.num_devices)})
    if layout.pp_size > 1:
        axes["schedule"] = list(SCHEDULES)
    axes |= {name: [False, True] for name in ("checkpointing", "offload_optimizer", "offload_params")}
    if layout.ep_size > 1:
        axes |= {"stream_experts": [False, True], "overlap_micro_batches": [1, 2]}
    if layout.ep_size > per_domain:
        axes["ranks_per_node"] = [0, per_domain]
    for name, values in axes.items():
        yield name, [value for value in values if value != getattr(layout, name)]


def _adjacent_divisors(size: int, number: int) -> list[int]:
    """The two divisors of ``number`` below ``size`` and the two above."""
    sizes = list(divisors(number))
    below, above = [s for s in sizes if s < size], [s for s in sizes if s > size]
    return below[-2:] + above[:2]


_NO_MODEL_PARALLELISM = {"tp_size": 1, "pp_size": 1, "stream_experts": False}


def smallest_cluster(planner: Planner) -> Cluster | None:
    """The smallest cluster of nodes of the first type with enough memory for the run and its global batch, or None."""
    nodes = planner.cluster.nodes[0]
    # Without model parallelism each rank has a part of the batch: with other numbers some ranks would wait for others.
    for num_devices in divisors(planner.config.deepspeed.train_batch_size):
        if num_devices % nodes.devices_per_node or (
            num_devices > nodes.devices_per_node and nodes.links.network is None
        ):
            continue
        cluster = planner.cluster.resized(num_devices)
        # Forced values keep infeasible candidates out of the search, for every size.
        other = planner.changed(cluster=cluster, forced={**_NO_MODEL_PARALLELISM, **planner.forced})
        for layout in other.candidates():
            if other.feasibility.refusal(layout) is None and not other.memory_rejection(layout):
                return cluster
    return None


def fastest_if_lifted(
    planner: Planner,
    lifted: Collection[RefusalKind],
    forced: dict[str, Any],
    accepts: Callable[[ParallelLayout], bool],
) -> PricedLayout | None:
    """The fastest fitting layout if refusals of the kinds ``lifted`` did not exist, or None.

    Args:
        forced: required values of the layout.
        accepts: a further condition on the layout.
    """
    other = planner.changed(forced={**planner.forced, **forced})
    found: PricedLayout | None = None
    for layout in filter(accepts, other.candidates()):
        if other.feasibility.refusal(layout, lifted) is not None:
            continue
        if other.memory_rejection(layout) is None:
            plan = PricedLayout(layout, other.memory(layout), other.time(layout))
            found = plan if found is None or plan.time.total < found.time.total else found
    return found


@dataclass(frozen=True)
class StreamedPlan:
    """A layout with streamed experts.

    Attributes:
        plan: the layout and its price.
        settings: the section ``m6.offload`` for it.
        refusal: the validation's reason against this run with ``m6.offload``; "" where it accepts the run.
    """

    plan: PricedLayout
    settings: OffloadSettings
    refusal: str


def fastest_streamed(planner: Planner) -> StreamedPlan | None:
    """The fastest fitting layout with streamed experts, or None.

    Refusals of ``m6.offload`` do not count. Updates in the backward pass are tried last: they need the least host
    memory, but forbid gradient clipping and several micro-batches a step.
    """
    if planner.config.m6.moe is None:
        return None
    forced = {"stream_experts": True, "pp_size": 1, "tp_size": 1}
    own = planner.config.expert_store
    optimizer = _experts_optimizer(planner.config)
    sections = [OffloadSettings(optimizer=optimizer), OffloadSettings(optimizer=optimizer, update="backward")]
    for settings in [own] if own is not None else sections:
        streaming = planner.changed(config=with_offload(planner.config, settings))
        accepts = _has_one_micro_batch(planner.config) if settings.update == "backward" else _accepts_any
        plan = fastest_if_lifted(streaming, {"streamed experts"}, forced, accepts)
        if plan is not None:
            return StreamedPlan(plan, settings, _streaming_refusal(streaming.config, plan.layout))
    return None


def _experts_optimizer(config: RunConfig) -> OffloadOptimizer | None:
    """Adafactor at the run's learning rate if the run's optimizer cannot update offloaded experts; else None.

    Adafactor has a much smaller state than AdamW. (SGD without momentum has none, but is not proposed.)
    """
    if config.deepspeed.optimizer_type not in UPDATE_NO_OFFLOADED:
        return None
    return OffloadOptimizer(type="Adafactor", lr=config.deepspeed.optimizer_params["lr"])


def _streaming_refusal(config: RunConfig, layout: ParallelLayout) -> str:
    document = configure(config, layout)
    document["m6"]["offload"] = config.m6.offload.model_dump(exclude_defaults=True) if config.m6.offload else {}
    try:
        check_world_size(parse_config(document), layout.world_size)
    except UserError as error:
        return str(error)
    return ""


def _has_one_micro_batch(config: RunConfig) -> Callable[[ParallelLayout], bool]:
    rows = config.deepspeed.train_batch_size
    return lambda layout: layout.micro_batch_size * layout.dp_size == rows


def _accepts_any(layout: ParallelLayout) -> bool:
    return True


def with_offload(config: RunConfig, settings: OffloadSettings) -> RunConfig:
    """The run with the section ``m6.offload``. It is not validated, so refused runs have a price, too."""
    return replace(config, m6=config.m6.model_copy(update={"offload": settings}))
