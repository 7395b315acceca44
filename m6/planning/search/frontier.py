"""Pareto-optimal plans, and the best plan for each number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from m6.errors import UserError
from m6.planning.machine.cluster import Cluster
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout

Item = TypeVar("Item")
_ALL_PLANS = 1 << 30


def pareto(items: Iterable[Item], costs: Callable[[Item], Sequence[float]]) -> list[Item]:
    """The items that no other item equals or beats in every cost, sorted by the first cost; of equal items the first.

    The frontier of TensorOpt (arXiv 2004.10856), over whole plans because this engine has no choices per layer.
    """
    kept: list[tuple[Sequence[float], Item]] = []
    for cost, item in sorted(((costs(item), item) for item in items), key=lambda pair: tuple(pair[0])):
        # Items are sorted, so that only earlier ones can beat this one.
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in kept):
            kept.append((cost, item))
    return [item for _, item in kept]


def plan_costs(plan: PricedLayout) -> tuple[float, float, float, float]:
    """Step time, device memory, host memory, devices."""
    return (plan.time.total, plan.footprint.peak, plan.footprint.host, plan.layout.world_size)


def frontier(planner_of: Callable[[Cluster], Planner], cluster: Cluster, counts: Sequence[int]) -> list[PricedLayout]:
    """The Pareto-optimal layouts over the numbers of devices in ``counts``.

    Args:
        planner_of: makes the planner of a part of ``cluster``.

    Raises:
        UserError: no layout fits on any of them.
    """
    plans: list[PricedLayout] = []
    for count in counts:
        plans = pareto([*plans, *_plans(planner_of(cluster.first(count)))], plan_costs)
    if not plans:
        raise UserError(f"no layout fits on {', '.join(map(str, counts))} devices of {cluster.name}")
    return plans


def curve(
    planner_of: Callable[[Cluster], Planner], cluster: Cluster, counts: Sequence[int]
) -> list[tuple[int, PricedLayout | None, str]]:
    """(devices, best plan, why there is none) for each number of devices: Rubick's sensitivity curve (2408.08586).

    Args:
        planner_of: makes the planner of a part of ``cluster``.
    """
    rows: list[tuple[int, PricedLayout | None, str]] = []
    for count in counts:
        try:
            rows.append((count, planner_of(cluster.first(count)).search().best, ""))
        except UserError as error:
            rows.append((count, None, str(error)))
    return rows


def device_counts(cluster: Cluster) -> list[int]:
    """1, 2, 4, ... devices of a node, then 1, 2, 4, ... nodes, and the whole cluster."""
    per_node, counts, size = cluster.nodes[0].devices_per_node, [], 1
    while size < per_node:
        if per_node % size == 0:
            counts.append(size)
        size *= 2
    size = per_node
    while size < cluster.num_devices:
        counts.append(size)
        size *= 2
    counts.append(cluster.num_devices)
    result = []
    for count in counts:
        try:
            cluster.first(count)
        except UserError:
            continue
        result.append(count)
    return result


def _plans(planner: Planner) -> list[PricedLayout]:
    try:
        return planner.search(_ALL_PLANS).plans
    except UserError:
        return []
