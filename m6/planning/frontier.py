"""Plans that none beats in everything, and throughput over numbers of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from m6.errors import UserError
from m6.planning.cluster import Cluster
from m6.planning.search import Plan, Planner

Item = TypeVar("Item")
_EVERY = 1 << 30


def pareto(items: Iterable[Item], costs: Callable[[Item], Sequence[float]]) -> list[Item]:
    """Those that no other equals or beats in every cost, of equal ones the first; sorted by the first cost.

    The frontier of TensorOpt (arXiv 2004.10856), over whole plans: this engine has no choices per layer.
    """
    kept: list[tuple[Sequence[float], Item]] = []
    for cost, item in sorted(((costs(item), item) for item in items), key=lambda pair: tuple(pair[0])):
        # What comes earlier is at least as good in the first cost; later ones cannot beat it there.
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in kept):
            kept.append((cost, item))
    return [item for _, item in kept]


def plan_costs(plan: Plan) -> tuple[float, float, float, float]:
    """Step time, device memory, host memory, devices."""
    return (plan.time.total, plan.footprint.peak, plan.footprint.host, plan.layout.world_size)


def frontier(planner_of: Callable[[Cluster], Planner], cluster: Cluster, counts: Sequence[int]) -> list[Plan]:
    """The Pareto set over all layouts on each number of devices in ``counts``."""
    plans: list[Plan] = []
    for count in counts:
        plans = pareto([*plans, *_plans(planner_of(cluster.first(count)), _EVERY)], plan_costs)
    if not plans:
        raise UserError(f"no layout fits on {', '.join(map(str, counts))} devices of {cluster.name}")
    return plans


def curve(
    planner_of: Callable[[Cluster], Planner], cluster: Cluster, counts: Sequence[int]
) -> list[tuple[int, Plan | None, str]]:
    """The best plan on each number of devices, or why there is none: Rubick's sensitivity curve (2408.08586)."""
    rows: list[tuple[int, Plan | None, str]] = []
    for count in counts:
        try:
            rows.append((count, planner_of(cluster.first(count)).search().best, ""))
        except UserError as error:
            rows.append((count, None, str(error)))
    return rows


def device_counts(cluster: Cluster) -> list[int]:
    """1, 2, 4, ... devices of a node, then as many nodes, up to the whole cluster."""
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


def draw_frontier(plans: list[Plan], out: Path) -> Path:
    """The frontier as a PNG: step time over device memory, one colour for each number of devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from m6.plots.run import save_figure

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for count in sorted({plan.layout.world_size for plan in plans}):
        those = [plan for plan in plans if plan.layout.world_size == count]
        sizes = [20 + 40 * (plan.footprint.host > 0) for plan in those]
        axes.scatter(
            [plan.footprint.peak / 1e9 for plan in those],
            [plan.time.total for plan in those],
            s=sizes,
            label=f"{count} devices",
        )
    axes.set(xlabel="device memory, GB", ylabel="seconds a step", yscale="log", title="large: states on the host")
    axes.grid(alpha=0.25)
    axes.legend()
    save_figure(figure, out)
    return out


def _plans(planner: Planner, number: int) -> list[Plan]:
    try:
        return planner.search(number).plans
    except UserError:
        return []
