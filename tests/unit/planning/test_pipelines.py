"""The search over schedule, cut and micro-batch of pipelines against brute force, and the JSON that it writes."""

import copy
import functools
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import RunConfig, parse_config
from m6.errors import UserError
from m6.planning.booking import book_stage
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.machine.profile import Profile
from m6.planning.reports import layout_table
from m6.planning.search.alternatives import alternatives
from m6.planning.search.configuration import configure, parse_forced
from m6.planning.search.job_files import job_description
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, Rejection
from m6.planning.search.stages import training_stages
from tests.fixtures.plans import brute_force, planner, small_base

PERFECT = Profile(bandwidth_efficiency=1.0, link_efficiency=1.0, matmul_efficiency=1.0, kernel_s=0.0)


def few(world: int) -> Cluster:
    return load_cluster(Path("a100_80g_x128")).first(world)


def mixed() -> Cluster:
    """Two fast and two slow devices; the slow ones have less memory."""
    types = load_cluster(Path("a100_v100_mixed")).nodes
    nodes = [each.model_copy(update={"count": 1, "devices_per_node": 2}) for each in types]
    return Cluster(name="mixed", nodes=nodes)


@pytest.mark.parametrize(("cluster", "rows", "layers"), [(few(2), 8, 6), (few(4), 16, 8), (mixed(), 8, 7)])
def test_pipelines_are_those_of_brute_force_over_every_cut(cluster: Cluster, rows: int, layers: int):
    subject = Planner(small_base(rows, num_layers=layers), cluster)
    every = brute_force(subject, every_cut=True)
    found = subject.search(5)
    assert found.plans[0].time.total == every[0].time.total
    pipelines = [plan for plan in every if plan.layout.pp_size > 1]
    assert len(pipelines) > 50
    assert found.fastest(pipeline=True).time.total == pytest.approx(pipelines[0].time.total, rel=1e-12)
    assert found.fastest(pipeline=True).time.bubble > 0


@pytest.mark.parametrize("experts", [True, False])
def test_a_pipeline_of_tensor_groups_is_visited_if_it_is_the_runs_own(experts: bool):
    document = small_base(8, num_layers=4).document
    document["zero_optimization"] = {"stage": 1}
    document["m6"]["moe"] = document["m6"]["moe"] if experts else None
    document["m6"]["parallel"] = {"tensor": {"num_ranks": 2}, "pipeline": {"num_ranks": 2}}
    config = parse_config(document)
    subject, own = Planner(config, few(8)), layout_of(config, 8)
    visited = {(layout.tp_size, layout.pp_size) for layout in subject.candidates()}
    assert {sizes for sizes in visited if min(sizes) > 1} == {(2, 2)}
    plans = subject.search(sys.maxsize).plans
    [price] = [plan.time.total for plan in plans if replace(plan.layout, cut=own.cut) == own]
    assert price <= subject.time(own).total


def late(config: RunConfig, **changes: Any) -> RunConfig:
    """The run with gradients one step late."""
    document = copy.deepcopy(config.document)
    document["m6"]["gradient_delay"] = {"accept_loss": True}
    for key, value in changes.items():
        *parents, last = key.split("__")
        functools.reduce(dict.__getitem__, parents, document)[last] = value
    return parse_config(document)


@pytest.mark.parametrize(("cluster", "rows", "layers"), [(few(2), 8, 6), (few(4), 8, 7), (mixed(), 8, 7)])
@pytest.mark.parametrize("interval", [1, 10])
def test_pipelines_without_a_flush_are_those_of_brute_force(cluster: Cluster, rows: int, layers: int, interval: int):
    """Every cut, with a flush after each step that logs, or after ten."""
    config = late(small_base(rows, num_layers=layers), m6__logging__interval_steps=interval)
    subject = Planner(config, cluster)
    every = brute_force(subject, every_cut=True)
    found = subject.search(5)
    assert found.plans[0].time.total == every[0].time.total
    pipelines = [plan for plan in every if plan.layout.pp_size > 1]
    assert len(pipelines) >= 30
    best = found.fastest(pipeline=True)
    assert best.time.total == pytest.approx(pipelines[0].time.total, rel=1e-12)
    flushed = Planner(small_base(rows, num_layers=layers), cluster)
    for plan in pipelines:
        assert subject.time.lower_bound(plan.layout) <= plan.time.total
        assert plan.time.total <= flushed.time(plan.layout).total * (1 + 1e-9)
        assert (plan.time.total < 0.95 * flushed.time(plan.layout).total) <= (interval > 1)
        assert plan.footprint.peak > flushed.memory(plan.layout).peak
    assert best.time.bubble < flushed.time(best.layout).bubble * (1.01 if interval == 1 else 0.2)
    written = parse_config(configure(config, best.layout))
    assert written.is_asynchronous
    assert layout_of(written, cluster.num_devices) == best.layout


def test_no_pipeline_is_planned_that_gradients_one_step_late_do_not_allow():
    config = small_base(16, num_layers=8)
    fp16 = late(config, bf16={"enabled": False}, fp16={"enabled": True}, zero_optimization={"stage": 1})
    biases = late(config, m6__moe__balance_bias_rate=0.01)
    for refused in (fp16, biases):
        assert Planner(refused, few(4)).search().fastest(pipeline=True) is None
    store = late(config, m6__offload={"optimizer": {"type": "AdamW", "lr": 0.001}})
    found = Planner(store, few(4)).search(sys.maxsize)
    assert any(plan.layout.stream_experts for plan in found.plans)
    pipelines = [plan.layout for plan in found.plans if plan.layout.pp_size > 1]
    assert pipelines
    for layout in pipelines:
        assert layout.schedule == "1f1b"
        assert parse_config(configure(store, layout)).is_asynchronous


@pytest.mark.parametrize("num_groups", [1, 3, 5])
def test_pipelines_of_a_pseudo_stage_keep_its_groups(num_groups: int):
    """Both stages, against every cut; with one group there is no pipeline."""
    document = small_base(8, num_layers=7).document
    document["m6"]["pseudo_to_real"] = {"switch_step": 10, "num_groups": num_groups}
    for subject in training_stages(Planner(parse_config(document), few(4))):
        every = brute_force(subject, every_cut=True)
        found = subject.search(5)
        assert found.plans[0].time.total == every[0].time.total
        pipelines = [plan for plan in every if plan.layout.pp_size > 1]
        assert bool(pipelines) == (num_groups > 1) == (found.fastest(pipeline=True) is not None)
        if pipelines:
            assert found.fastest(pipeline=True).time.total == pytest.approx(pipelines[0].time.total, rel=1e-12)
            parse_config(configure(subject.config, found.fastest(pipeline=True).layout))


def test_fast_devices_get_more_layers():
    forced = {"pp_size": 2, "schedule": "1f1b", "ep_size": 1, "zero_stage": 1, "micro_batch_size": 2}
    forced |= {"checkpointing": False, "offload_optimizer": False}
    subject = Planner(small_base(8, num_layers=8), mixed(), PERFECT, forced=forced)
    plan = subject.search(1).plans[0]
    fast, slow = plan.layout.cut
    assert fast > slow
    # Types are told apart by what they are, not by the names of their devices.
    faster, slower = mixed().nodes
    renamed = slower.model_copy(update={"device": slower.device.model_copy(update={"name": faster.device.name})})
    alike = Planner(small_base(8, num_layers=8), Cluster(name="alike", nodes=[faster, renamed]), PERFECT, forced=forced)
    assert alike.search(1).plans[0].layout == plan.layout
    # Devices of little memory get fewer layers, however fast they are.
    needed = subject.memory.footprints(plan.layout)[0].peak
    types = mixed().nodes
    little = types[0].device.model_copy(update={"memory_bytes": int(0.97 * needed / 0.9)})
    tight = Cluster(name="tight", nodes=[types[0].model_copy(update={"device": little}), types[1]])
    subject = Planner(small_base(8, num_layers=8), tight, PERFECT, forced=forced)
    plan = subject.search(1).plans[0]
    assert plan.layout.cut[0] < fast
    assert subject.memory.footprints(plan.layout)[0].peak <= 0.97 * needed


def test_what_the_search_finds_is_a_json_that_runs():
    config = small_base(16, num_layers=8)
    for schedule in ("1f1b", "interleaved_1f1b", "zbv", "dualpipev"):
        subject = Planner(config, few(4), forced={"pp_size": 2, "schedule": schedule})
        layout = subject.search(1).plans[0].layout
        assert sum(layout.cut) == 8
        written = parse_config(configure(config, layout))
        assert written.pipeline == layout.pipeline
        assert layout_of(written, 4) == layout
        again = configure(written, ParallelLayout(4, micro_batch_size=1, zero_stage=2))
        assert "pipeline" not in again["m6"]["parallel"]
        assert again["zero_optimization"]["stage"] == 2


def test_refusals_name_the_rule():
    subject = planner("m6t_100b", "a100_80g_x128")
    base = ParallelLayout(128, 16, pp_size=8, zero_stage=1, micro_batch_size=8, schedule="zbv")
    assert isinstance(subject.evaluate(base), PricedLayout)
    for changes, reason in [
        ({"zero_stage": 2}, "zero_optimization.stage 2 keeps whole gradients, as stage 1 does"),
        (
            {"micro_batch_size": 16},
            r"needs 16 micro-batches or more in a step \(2 x num_ranks\), but each pipeline has 8",
        ),
        ({"pp_size": 16, "ep_size": 8}, "makes 32 stages, but m6.model.num_layers is 24"),
    ]:
        found = subject.evaluate(replace(base, **changes))
        assert isinstance(found, Rejection)
        assert re.search(reason, found.reason), found.reason


def test_each_rank_streams_the_experts_of_its_stages():
    """What ranks hold and copy adds up to the whole; a rank waits for its own experts beside its own passes."""
    subject = planner("m6t_1t", "v100_32g_x480")
    subject.memory.device_bytes = None  # nothing stays on the device
    layout = ParallelLayout(480, 240, pp_size=2, zero_stage=1, micro_batch_size=4, stream_experts=True, cut=(16, 8))
    whole = replace(layout, pp_size=1, cut=())
    found = subject.evaluate(layout)
    assert isinstance(found, PricedLayout)
    streamed = subject.memory.experts_of_ranks(layout)
    assert streamed[0] == 2 * streamed[1]
    assert [sum(streamed)] == subject.memory.experts_of_ranks(whole)
    stores = [footprint.store for footprint in subject.memory.footprints(layout)]
    assert sum(stores) == pytest.approx(subject.memory(whole).store, rel=0.01)
    assert [footprint.host for footprint in subject.memory.footprints(layout)] == stores
    even = subject.time(replace(layout, cut=(12, 12)))
    # Copies and windows of a rank grow with its layers.
    assert subject.time(layout).host == pytest.approx(16 / 12 * even.host, rel=0.02)
    assert even.host > 0


def test_host_memory_is_that_of_the_rank_with_most_of_it():
    """The last rank, which has the head, fills its device with fewer experts than the first, but fills it more."""
    subject = planner("m6t_1t", "v100_32g_x480")
    layout = ParallelLayout(480, 240, pp_size=2, zero_stage=1, micro_batch_size=4, stream_experts=True, cut=(12, 12))
    plan = subject.evaluate(layout)
    assert isinstance(plan, PricedLayout)
    first, last = subject.memory.footprints(layout)
    assert first.host > 4 * last.host
    assert plan.footprint == last
    assert subject.host_bytes(layout) == 8 * first.host
    assert book_stage(subject, plan, 1440).host_gb == 8 * first.host / 1e9
    assert f" {8 * first.host / 1e9:.1f} |" in layout_table(subject, [plan])
    node = subject.cluster.nodes[0]
    small = node.model_copy(update={"host": node.host.model_copy(update={"memory_bytes": 2 * 8 * first.host})})
    subject.cluster = subject.cluster.model_copy(update={"nodes": [small]})
    assert job_description(subject, plan, 1440).memory_gb_per_node == 2 * 8 * first.host // 2**30


def test_a_plan_names_the_best_with_and_without_a_pipeline():
    subject = Planner(small_base(16, num_layers=8), few(4))
    result = subject.search()
    text = "\n".join(alternatives(subject, result))
    assert f"the fastest layout with one, {result.fastest(pipeline=True).layout}, takes" in text
    forced = Planner(small_base(16, num_layers=8), few(4), forced={"pp_size": 2})
    assert "none runs and fits" in "\n".join(alternatives(forced, forced.search()))


def test_no_plan_leaves_a_rank_without_experts_to_offload():
    """Every second layer has experts: on four ranks of four layers two would have none, and cuts may not make such."""
    document = small_base(16, num_layers=4, moe_layer_frequency=2).document
    document["m6"]["offload"] = {"optimizer": {"type": "Adafactor", "lr": 0.001}}
    config = parse_config(document)
    forced = {"stream_experts": True, "schedule": "1f1b", "zero_stage": 1, "micro_batch_size": 4}
    found = Planner(config, few(4), forced={**forced, "pp_size": 2}).search(5)
    for plan in found.plans:
        parse_config(configure(config, plan.layout))
    with pytest.raises(UserError, match=r"m6\.offload: rank 0 of m6\.parallel\.pipeline has layers \[0\], none"):
        Planner(config, few(4), forced={**forced, "pp_size": 4}).search()


def test_slices_need_no_number_of_micro_batches():
    document = small_base(4, num_layers=4).document
    document["m6"]["moe"].pop("capacity_factor", None)
    document["zero_optimization"] = {"stage": 1}
    document["m6"]["parallel"] = {"pipeline": {"num_ranks": 4, "slices": 4}}
    config = parse_config(document)
    subject = Planner(config, few(4))
    layout = replace(layout_of(config, 4), micro_batch_size=4)
    assert isinstance(subject.evaluate(layout), PricedLayout)
    found = subject.evaluate(replace(layout, schedule="interleaved_1f1b", cut=()))
    assert isinstance(found, Rejection)


def test_a_user_forces_schedule_and_cut():
    forced = parse_forced(("pp_size=2", "schedule=1f1b", "cut=3,5"))
    assert forced == {"pp_size": 2, "schedule": "1f1b", "cut": (3, 5)}
    found = Planner(small_base(16, num_layers=8), few(4), forced=forced).search(3)
    assert {plan.layout.cut for plan in found.plans} == {(3, 5)}
    with pytest.raises(UserError, match="expected numbers such as 3,1, found '3;5'"):
        parse_forced(("cut=3;5",))
    with pytest.raises(UserError, match=r"expected one of 1f1b, .*dualpipev, found 'zbw'"):
        parse_forced(("schedule=zbw",))
    with pytest.raises(UserError, match="no layout has the forced pp_size=5: pp_size must divide the 128 devices"):
        planner("m6t_100b", "a100_80g_x128", forced={"pp_size": 5}).search()
    with pytest.raises(UserError, match=r'every layout .* is refused .*"schedule": "1f1b" on 2 ranks, found 3'):
        Planner(small_base(16, num_layers=8), few(4), forced={**forced, "cut": (3, 3, 2)}).search()
