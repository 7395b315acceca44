"""Pareto sets and curves against all plans."""

import random
from pathlib import Path

from m6.planning.cost.layout import divisors
from m6.planning.machine.cluster import load_cluster
from m6.planning.search.frontier import curve, device_counts, frontier, pareto, plan_costs
from m6.planning.search.planner import Planner
from m6.plots.frontier import draw_frontier
from tests.fixtures.plans import brute_force, small_base


def test_pareto_is_what_nothing_dominates():
    generator = random.Random(0)
    for _ in range(50):
        points = [tuple(generator.randrange(6) for _ in range(3)) for _ in range(generator.randrange(1, 40))]
        found = pareto(points, lambda point: point)

        def beaten(point: tuple[int, ...], among: list[tuple[int, ...]]) -> bool:
            return any(p != point and all(a <= b for a, b in zip(p, point, strict=True)) for p in among)

        assert set(found) == {point for point in points if not beaten(point, points)}
        assert len(found) == len(set(found))


def test_frontier_and_curve(tmp_path: Path):
    config, cluster = small_base(16), load_cluster(Path("a100_80g_x128")).first(8)
    counts = device_counts(cluster)
    assert counts == [1, 2, 4, 8]
    plans = frontier(lambda part: Planner(config, part), cluster, counts)
    everything = [plan for count in counts for plan in brute_force(Planner(config, cluster.first(count)))]
    expected = {plan_costs(plan) for plan in pareto(everything, plan_costs)}
    assert {plan_costs(plan) for plan in plans} == expected
    assert draw_frontier(plans, tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    rows = curve(lambda part: Planner(config, part), cluster, counts)
    assert [count for count, plan, _ in rows if plan is not None] == counts
    assert list(divisors(8)) == [1, 2, 4, 8]
