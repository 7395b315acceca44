"""Layouts of both stages of a Pseudo-to-Real run, and their files."""

import itertools
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import load_config, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import layout_of
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.reports import explanation, run_report
from m6.planning.search.job_files import job_files
from m6.planning.search.planner import Planner
from m6.planning.search.stages import plan_run, search_stages, stage_steps, training_stages
from m6.slurm.job import load_job
from tests.fixtures.plans import planner, small_base

CONFIGS = Path(__file__).parents[3] / "configs"


def stages(name: str, cluster: str, world: int, switch_step: int = 20_000) -> list[Planner]:
    config = load_config(Path(name), (f'm6.pseudo_to_real={{"switch_step": {switch_step}}}',))
    return training_stages(Planner(config, load_cluster(Path(cluster)).scaled(world)))


def test_each_stage_has_its_own_layout_where_the_run_may_change_it():
    """Experts of the Pseudo stage fit a node, those of the Real one need both and the host."""
    found = stages("m6t_100b", "a100_80g_x128", 16)
    pseudo, real = (result.best.layout for result in search_stages(found))
    assert (pseudo.ep_size, real.ep_size) == (8, 16)
    assert (pseudo.offload_optimizer, real.offload_optimizer) == (False, True)
    alone = [stage.search().best.layout for stage in found]
    assert [(own.ep_size, own.offload_optimizer) for own in alone] == [(16, False), (16, True)]
    # By itself the Pseudo stage would hide an exchange between nodes, in micro-batches too small for the Real one.
    assert (alone[0].overlap_micro_batches, alone[0].micro_batch_size) == (2, pseudo.micro_batch_size // 2)


@pytest.mark.parametrize("switch_step", [1000, 45_000])
def test_what_the_run_keeps_is_chosen_for_all_steps_together(switch_step: int):
    """By itself each stage takes another micro-batch; the choice against every pair of layouts that a run may have."""
    found = stages("m6t_100b", "a100_80g_x128", 16, switch_step)
    alone = [stage.search().best.layout.micro_batch_size for stage in found]
    assert alone[0] != alone[1]
    results = search_stages(found)
    layouts = [result.best.layout for result in results]
    assert layouts[0].micro_batch_size == layouts[1].micro_batch_size
    steps = [stage_steps(stage) for stage in found]
    assert sum(steps) == found[0].config.m6.training.total_steps
    least = min(
        sum(number * plan.time.total for number, plan in zip(steps, pair, strict=True))
        for pair in itertools.product(*(stage.search(10**6).plans for stage in found))
        if len({(plan.layout.micro_batch_size, plan.layout.stream_experts) for plan in pair}) == 1
    )
    taken = sum(number * result.best.time.total for number, result in zip(steps, results, strict=True))
    assert taken <= least * 1.01  # of layouts within 1 % the simplest is taken


def test_a_stage_that_fits_nowhere_has_no_plans():
    pseudo, real = search_stages(stages("m6t_1t", "v100_32g_x128", 16))
    assert pseudo.plans
    assert not real.plans


def test_stages_that_only_fit_with_other_micro_batches():
    pseudo, real = stages("m6t_100b", "a100_80g_x128", 32)
    apart = [pseudo.changed(forced={"micro_batch_size": 16}), real.changed(forced={"micro_batch_size": 8})]
    with pytest.raises(UserError, match="no layouts of both stages have the same micro_batch_size and stream_experts"):
        search_stages(apart)


def test_two_jobs_of_one_run(tmp_path: Path):
    found = stages("m6t_100b", "a100_80g_x128", 16)
    plans = [result.best for result in search_stages(found)]
    jobs = job_files(found, plans, "run", 1440)
    assert [job.name for job in jobs] == ["run.pseudo", "run.real"]
    for job, plan, ends in zip(jobs, plans, (True, False), strict=True):
        job.write(tmp_path)
        config = load_config(tmp_path / f"{job.name}.json")
        assert layout_of(config, 16) == plan.layout
        assert (
            config.m6.training.total_steps == found[0].config.m6.training.total_steps
        )  # the schedule of the whole run
        assert config.m6.pseudo_to_real is not None
        assert config.m6.pseudo_to_real.stop_at_switch == ends
        assert (config.last_sharing is not None) == ends
        assert load_job(tmp_path / f"{job.name}.job.json").world_size == 16
        assert (
            (tmp_path / f"{job.name}.sbatch")
            .read_text()
            .startswith(f"#!/usr/bin/env bash\n#SBATCH --job-name={job.name}\n")
        )
    # A JSON that ended at the switch is planned again as a run of both stages.
    again = training_stages(Planner(load_config(tmp_path / "run.pseudo.json"), found[0].cluster))
    together = job_files(again, [plans[1], plans[1]], "run", 1440)
    assert [job.name for job in together] == ["run"]
    assert "stop_at_switch" not in together[0].document["m6"]["pseudo_to_real"]


def random_cluster(generator: random.Random) -> Cluster:
    """One or two types of few nodes, on networks from slow to fast."""
    types = []
    for node_type in generator.sample(load_cluster(Path("a100_v100_mixed")).nodes, generator.choice([1, 2])):
        network = node_type.links.network
        assert network is not None
        rate = network.bandwidth_bytes_per_s / generator.choice([1, 30, 1000])
        links = node_type.links.model_copy(
            update={"network": network.model_copy(update={"bandwidth_bytes_per_s": rate})}
        )
        sizes = {"count": generator.choice([1, 2, 3]), "devices_per_node": generator.choice([1, 2, 4])}
        types.append(node_type.model_copy(update={"links": links, **sizes}))
    return Cluster(name="random", nodes=types)


def run_s(subject: Planner) -> float:
    """Seconds of all steps with the layouts that a search finds for all devices; infinite without any."""
    found = training_stages(subject)
    try:
        return sum(stage_steps(stage) * r.best.time.total for stage, r in zip(found, search_stages(found), strict=True))
    except UserError:
        return math.inf


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 12))])
def test_no_plan_is_slower_than_that_of_a_part_of_the_devices(seed: int):
    generator = random.Random(seed)
    cluster = random_cluster(generator)
    document = small_base(2 * cluster.num_devices, num_layers=4).document
    if seed % 4 == 0:
        document["m6"]["pseudo_to_real"] = {"switch_step": 500}
    subject = Planner(parse_config(document), cluster)
    parts = [
        *(Cluster(name="type", nodes=[node_type]) for node_type in cluster.nodes),
        *(Cluster(name="t", nodes=[node]).first(node.devices_per_node) for node in cluster.nodes),
        *(Cluster(name="t", nodes=[node]).first(1) for node in cluster.nodes),
        *cluster.parts(),
    ]
    everywhere = [run_s(subject.changed(cluster=part)) for part in (cluster, *parts)]
    assert min(everywhere) < math.inf
    plan = plan_run(subject)
    steps = [stage_steps(stage) for stage in plan.stages]
    taken = sum(number * result.best.time.total for number, result in zip(steps, plan.results, strict=True))
    assert taken == min(everywhere)
    assert bool(plan.whole[0]) == (plan.stages[0].cluster.num_devices < cluster.num_devices)


def test_a_batch_that_divides_among_fewer_nodes():
    """Nine samples on five devices take as many passes as on three, with more gradients to exchange."""
    kind = load_cluster(Path("h100_x128")).nodes[0].model_copy(update={"count": 5, "devices_per_node": 1})
    subject = Planner(small_base(9, num_layers=4), Cluster(name="five", nodes=[kind]))
    plan = plan_run(subject)
    assert plan.stages[0].cluster.num_devices == 3
    alone = [subject.changed(cluster=subject.cluster.first(n)).search(1).best.time.total for n in range(1, 5)]
    assert plan.results[0].best.time.total == min(alone)


def test_parts_of_a_mixed_cluster():
    """Each type, with fewer nodes and within a node; both types, and fewer nodes of either."""
    types = load_cluster(Path("a100_v100_mixed")).nodes
    few = [each.model_copy(update={"count": count}) for each, count in zip(types, (3, 2), strict=True)]
    parts = Cluster(name="c", nodes=few).parts()
    found = [tuple((each.device.name, each.count * each.devices_per_node) for each in part.nodes) for part in parts]
    (fast, fast_size), (slow, slow_size) = ((each.device.name, each.devices_per_node) for each in few)
    both = {((fast, fast_size * a), (slow, slow_size * b)) for a, b in ((1, 2), (2, 2), (3, 1))}
    assert {each for each in found if len(each) == 2} == both
    assert ((fast, 2 * fast_size),) in found
    assert ((slow, 1),) in found
    assert len(set(found)) == len(found)
    assert len({part.name for part in parts if len(part.nodes) == 2}) == len(both)


def test_slow_devices_are_left_out_where_they_would_slow_the_others_down():
    """With equal shares all 128 devices of this cluster take longer for a step than its 64 faster ones."""
    equal: dict[str, Any] = {"forced": {"shares": ()}}
    mixed, fast = (planner("m6t_100b", "a100_v100_mixed", world=world, **equal) for world in (None, 64))
    plan, alone = plan_run(mixed), fast.search().best
    assert plan.results[0].best == alone
    slow = mixed.search().best
    assert slow.time.total > 1.3 * alone.time.total
    report = run_report(plan)[0]
    assert f"with all of them a step takes {slow.time.total:.4g} s ({slow.layout})" in report
    # Each type of devices is compared with its own memory.
    limits = re.findall(r"\*\*(\w+), at most\*\* \| \*\*([\d.]+) GB\*\* of ([\d.]+) GB", explanation(mixed, slow))
    assert [(name, float(limit)) for name, _, limit in limits] == [("A100", 72.0), ("V100", 30.92)]
    assert all(float(peak) <= float(limit) for _, peak, limit in limits)
