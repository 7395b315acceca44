"""The search against brute force, and what it finds for the machines of M6-T and M6-10T.

Pareto sets and curves against all plans.
"""

import random
from pathlib import Path

import pytest

from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout, divisors
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.reports import no_plan_report
from m6.planning.search.planner import Planner, curve, device_counts, frontier, pareto, plan_costs
from m6.planning.search.stages import training_stages
from m6.plots.plans import draw_frontier
from tests.fixtures.plans import brute_force, planner, small_base


@pytest.mark.parametrize(("world", "rows", "memory"), [(2, 8, 80e9), (4, 8, 16e9), (8, 16, 10e9), (8, 24, 80e9)])
def test_search_is_brute_force(world: int, rows: int, memory: float):
    cluster = load_cluster(Path("a100_80g_x128")).first(world)
    device = cluster.nodes[0].device.model_copy(update={"memory_bytes": int(memory)})
    cluster = Cluster(name="small", nodes=[cluster.nodes[0].model_copy(update={"device": device})])
    subject = Planner(small_base(rows), cluster, forced={"pp_size": 1})  # of pipelines see test_pipelines.py
    expected, found = brute_force(subject), subject.search(5)
    assert expected
    assert found.plans[0].time.total == expected[0].time.total
    for ours, theirs in zip(found.plans[:5], expected, strict=False):
        assert ours.time.total == pytest.approx(theirs.time.total, rel=1e-12)
    assert len(subject.search(1 << 30).plans) == len(expected)
    assert found.visited == sum(found.counters.values()), "every layout has a reason"


def test_ties_go_to_the_simpler_layout():
    found = planner("m6t_100b", "a100_80g_x128").search()
    best = found.best
    assert best.time.total <= found.plans[0].time.total * 1.01
    assert all(best.complexity <= plan.complexity for plan in found.plans if plan.time.total <= best.time.total)


def test_cost_of_planning_is_independent_of_depth():
    """Counted in blocks that are priced, not in seconds."""
    shallow = Planner(small_base(8, num_layers=2), load_cluster(Path("a100_80g_x128")).first(2))
    deep = Planner(small_base(8, num_layers=64), load_cluster(Path("a100_80g_x128")).first(2))
    assert len(shallow.memory.model.blocks) == len(deep.memory.model.blocks)
    layout = ParallelLayout(2, zero_stage=1, micro_batch_size=1)
    assert len(shallow.time.compute.work(layout)) == len(deep.time.compute.work(layout))


def on_the_device(name: str, cluster: str) -> Planner:
    """The planner of a configuration whose experts DeepSpeed updates, with Adam."""
    document = load_config(Path(name)).document
    del document["m6"]["offload"]
    return Planner(parse_config(document), load_cluster(Path(cluster)), forced={"offload_optimizer": False})


@pytest.mark.slow
def test_512_gpus_of_32_gb_must_stream_the_parameters_of_10t():
    """M6-10T (arXiv 2110.03888): 19.6 B expert parameters a GPU are 39.3 GB in 16 bits already."""
    experts = 10240 // 512 * 2 * 1024 * 9984 * 48
    assert 2 * experts == pytest.approx(39.3e9, rel=2e-3)
    alone = on_the_device("m6_10t", "v100_32g_x512")
    assert 2 * experts > alone.cluster.nodes[0].device.memory_bytes
    result = alone.search()
    assert not result.plans
    with pytest.raises(UserError, match=r"no layout fits; the nearest: .* GB too much"):
        _ = result.best
    report = no_plan_report(alone, result)
    for part in ("no layout fits", "What would hold it"):
        assert part in report
    # With fp32 masters 8 bytes a parameter are 1,256 GB of a node's 736; without them 4 are 628.
    masters = planner("m6_10t", "v100_32g_x512", "m6.offload.master_weights=true").search()
    assert not masters.plans
    shipped = planner("m6_10t", "v100_32g_x512").search().best
    assert shipped.layout.stream_experts
    assert 0 < shipped.footprint.owned_experts < shipped.footprint.host
    assert shipped.footprint.host + shipped.footprint.owned_experts == pytest.approx(4 * experts, rel=0.01)


def test_the_work_of_a_512_gpu_search():
    """Counted in layouts, not in seconds: the cheap checks reject nearly all of them."""
    result = training_stages(planner("m6_10t", "v100_32g_x512"))[0].search()
    assert result.visited < 200_000
    assert result.counters["priced"] + result.counters.get("device memory", 0) < 2_000


def test_forced_layouts():
    with pytest.raises(UserError, match=r"every layout .* is refused .*stage 3 cannot hold experts"):
        planner("m6t_100b", "a100_80g_x128", forced={"zero_stage": 3, "ep_size": 128}).search()
    forced = planner("m6t_100b", "a100_80g_x128", forced={"zero_stage": 2, "micro_batch_size": 4}).search().best
    assert (forced.layout.zero_stage, forced.layout.micro_batch_size) == (2, 4)


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
