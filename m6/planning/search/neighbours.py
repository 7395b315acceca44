"""The layouts that differ from a plan in one choice, and why each of them is not better."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from m6.architecture.received import PLACEMENTS
from m6.config.pipeline import SCHEDULES
from m6.planning.cost.layout import ParallelLayout, divisors
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, Rejection


def neighbours(planner: Planner, plan: PricedLayout) -> list[Rejection]:
    """Every layout that differs from ``plan`` in one choice, with what is wrong with it."""
    found = []
    for name, values in _other_values(planner, plan.layout):
        for value in values:
            changed = replace(plan.layout, **{"cut": (), name: value})
            if name != "ranks_per_node":  # a choice of its own, which depends on the others
                changed = planner.time.exchange.faster(replace(changed, ranks_per_node=0))
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
        axes |= {"stream_experts": [False, True], "micro_batches_at_once": [1, 2]}
    if layout.ep_size > per_domain:
        axes["ranks_per_node"] = [0, per_domain]
    for name, values in axes.items():
        yield name, [value for value in values if value != getattr(layout, name)]


def _adjacent_divisors(size: int, number: int) -> list[int]:
    """The two divisors of ``number`` below ``size`` and the two above."""
    sizes = list(divisors(number))
    below, above = [s for s in sizes if s < size], [s for s in sizes if s > size]
    return below[-2:] + above[:2]
