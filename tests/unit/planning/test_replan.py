"""The layout of a run on the nodes it has: against all plans, with its own measurements, failures and bounds."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m6.config.elastic import CHANGEABLE
from m6.config.run import RunConfig, load_config, parse_config
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.replan import Decision, check_bounds, is_planned_work, node_of, possible_nodes, replan, settings_of
from m6.planning.search.planner import Planner
from m6.runs.directory import RunDirectory
from m6.runs.layouts import LayoutRecord, measured_steps, read_layouts, write_layouts
from tests.fixtures.command import m6, user_error
from tests.fixtures.plans import CONFIGS, small_base
from tests.fixtures.tiny_run import write_tiny_config

NODE = load_cluster(Path("a100_80g_x128"))


def run(**elastic: Any) -> RunConfig:
    """m6t_base with 256 samples a step in micro-batches of 4: 64 micro-batches, and no pipelines to price."""
    document = small_base(256).document
    document["train_micro_batch_size_per_gpu"] = 4
    may_change = [name for name in CHANGEABLE if name != "pipeline"]
    document["m6"]["elastic"] = {"max_nodes": 4, "may_change": may_change, **elastic}
    return parse_config(document)


def record(decision: Decision, **changes: Any) -> LayoutRecord:
    return decision.record(time=0.0, step=0, available=4).model_copy(update=changes)


def every_plan(config: RunConfig, nodes: int) -> dict[ParallelLayout, float]:
    """Seconds of every layout of up to ``nodes`` nodes that fits and keeps micro-batch and offloading."""
    found = {}
    for count in range(1, nodes + 1):
        planner = Planner(config, NODE.resized(8 * count), forced={"pp_size": 1})
        for plan in planner.search(num_plans=100_000).plans:
            layout = plan.layout
            if layout.micro_batch_size == 4 and not (layout.offload_optimizer or layout.offload_params):
                found[layout] = plan.time.total
    return found


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_fastest_of_all_layouts(nodes: int):
    decision, plans = replan(run(), NODE, nodes), every_plan(run(), nodes)
    assert plans[decision.layout] == pytest.approx(decision.predicted_s)
    # Among layouts within 1 % the planner takes the simplest.
    assert decision.predicted_s <= 1.01 * min(plans.values())
    assert decision.nodes == math.ceil(decision.layout.world_size / 8) <= nodes


def test_how_many_nodes_would_be_worth_a_new_start():
    assert replan(run(), NODE, 1).grow_at == 2
    assert replan(run(), NODE, 2).grow_at == 4
    assert replan(run(), NODE, 3).grow_at == 4
    assert replan(run(), NODE, 4).grow_at == 0
    assert replan(run(min_gain=0.99), NODE, 1).grow_at == 0


def test_what_may_not_change_stays():
    kept = replan(run(may_change=[]), NODE, 4).layout
    assert (kept.ep_size, kept.zero_stage, kept.checkpointing, kept.ranks_per_node) == (1, 1, True, 0)
    free = replan(run(may_change=["zero_stage"]), NODE, 4).layout
    assert (free.ep_size, free.checkpointing, free.ranks_per_node) == (1, True, 0)


def test_any_world_keeps_the_experts_of_a_rank():
    document = run(may_change=None).document
    document["m6"]["training"] |= {"deterministic": "any_world", "ep_size": 2}
    document["zero_optimization"] = {"stage": 1}
    document["m6"]["moe"].pop("balance_scope", None)
    for nodes in (1, 2, 3, 4):
        layout = replan(parse_config(document), NODE, nodes).layout
        assert layout.ep_size == 2
        assert layout.zero_stage <= 1
    document["m6"]["elastic"]["may_change"] = ["ep_size"]
    with pytest.raises(UserError, match=r'm6\.elastic\.may_change: "ep_size" changes the sums'):
        parse_config(document)


@pytest.mark.parametrize("dense", [True, False])
def test_tensor_groups_stay(dense: bool):
    """``may_change`` has no name for them, so that each layout divides the matrices as the run's JSON does."""
    document = run(may_change=None).document
    document["zero_optimization"] = {"stage": 1}
    if dense:
        document["m6"]["moe"], document["m6"]["training"]["ep_size"] = None, 1
    document["m6"]["parallel"] = {"tensor": {"num_ranks": 2}}
    for nodes in (1, 2, 4):
        layout = replan(parse_config(document), NODE, nodes).layout
        assert (layout.tp_size, layout.pp_size, layout.placement) == (2, 1, "1d")
        assert layout.zero_stage < 3


def test_fixed_budgets_of_offloaded_experts_bound_the_layouts():
    """With half of the nodes a rank has twice the experts: a budget between both needs leaves only the larger job."""
    document = run(may_change=["ep_size"]).document
    document["zero_optimization"] = {"stage": 1}

    def with_budgets(**budgets: float) -> RunConfig:
        changed = json.loads(json.dumps(document))
        changed["m6"]["offload"] = {"optimizer": {"type": "Adafactor", "lr": 0.001}, **budgets}
        return parse_config(changed)

    four, two = (replan(with_budgets(), NODE, nodes).layout for nodes in (4, 2))
    memory = Planner(with_budgets(), NODE.resized(32)).memory
    memory.device_bytes = None  # nothing stays on the device
    largest = [replace(layout, ep_size=layout.world_size) for layout in (four, two)]
    enough, half = (memory(layout).store / 2**20 for layout in largest)
    assert half > 1.9 * enough
    # The budget of the device leaves no room for experts, and that of the host lacks less.
    peak = memory(two).peak / 2**20
    tight = with_budgets(host_budget_mib=0.95 * half, device_budget_mib=1.01 * peak)
    assert replan(tight, NODE, 4).layout.ep_size == 32
    with pytest.raises(
        UserError, match=r"m6\.elastic: no layout of 1 to 2 nodes fits: .* in m6\.offload\.host_budget_mib"
    ):
        replan(tight, NODE, 2)
    assert replan(with_budgets(device_budget_mib=1.01 * peak), NODE, 2).nodes <= 2
    with pytest.raises(UserError, match=r"in m6\.offload\.device_budget_mib"):
        replan(with_budgets(device_budget_mib=0.1 * peak), NODE, 2)


def test_a_layout_stays_until_another_saves_enough():
    first = replan(run(), NODE, 2)
    again = replan(run(), NODE, 2, [record(first)], [None])
    assert (again.layout, again.reason) == (first.layout, "as before")
    more = replan(run(), NODE, 4, [record(first)], [None])
    assert more.nodes == 4
    assert "saves" in more.reason
    assert str(first.layout) in more.reason
    stubborn = replan(run(min_gain=0.99), NODE, 4, [record(first)], [None])
    assert stubborn.layout == first.layout
    assert "would save only" in stubborn.reason
    fewer = replan(run(), NODE, 1, [record(more)], [None])
    assert fewer.nodes == 1
    assert "does not fit these nodes" in fewer.reason


def test_it_learns_from_what_the_run_measured():
    """An exchange that is ten times slower than the planner thinks moves the choice to layouts that exchange less."""
    first = replan(run(may_change=["ep_size"]), NODE, 4)
    assert first.layout.ep_size > 1, "else there would be nothing to learn"
    truth = {layout: slow_exchange(layout) for layout in every_plan(run(), 4)}
    history, measured, choice = [], [], first
    for _ in range(3):
        history, measured = [*history, record(choice)], [*measured, truth[choice.layout]]
        choice = replan(run(may_change=["ep_size"]), NODE, 4, history, measured)
    # One measurement does not tell which part of a step is slow, so the best need not be found at once.
    assert choice.layout.ep_size < first.layout.ep_size
    assert truth[choice.layout] < 0.85 * truth[first.layout]
    assert choice.predicted_s == truth[choice.layout], "known layouts have their own measurement"


def slow_exchange(layout: ParallelLayout) -> float:
    parts = Planner(run(), NODE.resized(layout.world_size)).time(layout).parts()
    return sum(seconds * (10 if name == "exchange" else 1) for name, seconds in parts.items())


def test_layouts_that_failed_are_not_used_again():
    first = replan(run(), NODE, 2)
    second = replan(run(), NODE, 2, [record(first, failed=True)], [None])
    assert second.layout != first.layout
    assert "has not failed" in second.reason
    # One that has worked before is not blamed, and one without an alternative is tried again.
    worked = replan(run(), NODE, 2, [record(first), record(first, failed=True)], [first.predicted_s, None])
    assert worked.layout == first.layout
    only = run(may_change=[], min_nodes=2, max_nodes=2)
    alone = replan(only, NODE, 2)
    assert replan(only, NODE, 2, [record(alone, failed=True)], [None]).layout == alone.layout


def test_no_new_start_for_a_layout_that_was_slow_or_failed():
    config = run(max_nodes=2, may_change=[])
    two, one = replan(config, NODE, 2), replan(config, NODE, 1)
    assert one.grow_at == 2
    seconds = one.predicted_s
    assert replan(config, NODE, 1, [record(two), record(one)], [10 * seconds, seconds]).grow_at == 0
    assert replan(config, NODE, 1, [record(two, failed=True), record(one)], [None, None]).grow_at == 0


def test_only_steps_of_the_planned_work_are_compared(tmp_path: Path):
    document = run().document
    document["m6"]["logging"]["interval_steps"] = 10
    document["m6"]["training"]["batch_ramp"] = [{"batch_size": 128, "steps": 40}]
    counts = is_planned_work(parse_config(document))
    assert [counts({"step": step}) for step in (40, 49, 50)] == [False, False, True]
    del document["m6"]["training"]["batch_ramp"]
    document["m6"]["pseudo_to_real"] = {"switch_step": 100}
    counts = is_planned_work(parse_config(document))
    assert [counts({"step": 1, "stage": {"name": name}}) for name in ("pseudo", "real")] == [False, True]
    assert is_planned_work(run())({"step": 1})


def test_all_nodes_are_used_where_they_do_not_divide_the_batch():
    """Of 64 micro-batches three ranks have 22, 21 and 21, two have 32 each; also under "any_world"."""
    for deterministic in (None, "any_world"):
        document = run(may_change=["zero_stage", "checkpointing"]).document
        document["zero_optimization"] = {"stage": 1}
        document["m6"]["training"]["deterministic"] = deterministic
        decision = replan(parse_config(document), one_rank(), 3)
        assert (decision.nodes, decision.layout.world_size) == (3, 3)
        assert decision.layout.accumulation(256) == 22


def test_bounds_that_nothing_meets_name_what_would():
    assert possible_nodes(run(), 8) == [1, 2, 3, 4]
    with pytest.raises(
        UserError, match=r"from 9 to 9 with 8 ranks each can run it: train_batch_size 256 must have .*; 8 could"
    ):
        check_bounds(run(min_nodes=9, max_nodes=9), 8)
    check_bounds(run(), 8)
    with pytest.raises(UserError, match=r"m6\.elastic\.min_nodes is 2, but the job has 1 nodes"):
        replan(run(min_nodes=2), NODE, 1)
    with pytest.raises(UserError, match=r"of 9 to 9 nodes fits: 9: .* 64 micro-batches of 4, fewer than the 72"):
        replan(run(min_nodes=9, max_nodes=9), NODE, 9)
    with pytest.raises(UserError, match="min_nodes 5 is above max_nodes 4"):
        run(min_nodes=5)
    document = run().document | {"gradient_accumulation_steps": 1}
    with pytest.raises(UserError, match=r"gradient_accumulation_steps: with m6\.elastic it follows"):
        parse_config(document)
    document = copy.deepcopy(run().document)
    document["m6"]["parallel"] = {"shares": [1, 1]}
    with pytest.raises(UserError, match=r"m6\.parallel\.shares: with m6\.elastic each attempt divides"):
        parse_config(document)


def test_a_pipeline_of_a_run_goes_and_comes(tmp_path: Path):
    """Three nodes of one rank each read the same micro-batches."""
    config = run(may_change=None, max_nodes=3)
    assert possible_nodes(config, 1) == [1, 2, 3]
    plain = ParallelLayout(2, micro_batch_size=4, zero_stage=1)
    with_pipeline = replace_pipeline(config, {"num_ranks": 2, "schedule": "1f1b", "layers": [2, 3]})
    assert "m6.parallel.pipeline=null" in settings_of(with_pipeline, plain)
    layout = ParallelLayout(3, pp_size=3, micro_batch_size=4, zero_stage=1, schedule="1f1b", cut=(1, 2, 2))
    [setting] = [each for each in settings_of(config, layout) if each.startswith("m6.parallel")]
    assert json.loads(setting.partition("=")[2]) == {"num_ranks": 3, "schedule": "1f1b", "layers": [1, 2, 2]}
    (tmp_path / "run.json").write_text(json.dumps(config.document))
    assert layout_of(load_config(tmp_path / "run.json", tuple(settings_of(config, layout))), 3) == layout
    decision = replan(replace_pipeline(run(may_change=["pipeline"]), None), one_rank(), 3)
    kept = record(decision)
    assert ParallelLayout(**json.loads(kept.model_dump_json())["layout"]) == decision.layout


def replace_pipeline(config: RunConfig, pipeline: dict[str, Any] | None) -> RunConfig:
    document = config.document
    document["zero_optimization"] = {"stage": 1}
    document["m6"]["parallel"] = {"pipeline": pipeline}
    return parse_config(document)


def one_rank() -> Cluster:
    """Nodes of one device."""
    [nodes] = NODE.nodes
    return Cluster(name="small", nodes=[nodes.model_copy(update={"count": 4, "devices_per_node": 1})])


def test_each_rank_has_a_micro_batch_of_the_batches_of_a_ramp_too():
    document = run().document
    document["m6"]["training"]["batch_ramp"] = [{"steps": 10, "batch_size": 64}]  # 16 micro-batches
    config = parse_config(document)
    assert possible_nodes(config, 8) == [1, 2]
    assert replan(config, NODE, 4).nodes == 2


def test_settings_give_the_layout_and_leave_the_run(tmp_path: Path):
    config = run()
    (tmp_path / "run.json").write_text(json.dumps(config.document))
    for nodes in (1, 2, 4):
        layout = replan(config, NODE, nodes).layout
        changed = load_config(tmp_path / "run.json", tuple(settings_of(config, layout)))
        assert layout_of(changed, layout.world_size) == layout
    # Both are the same run: it resumes under either.
    folder = RunDirectory(tmp_path / "run")
    folder.open(config, 8)
    (tmp_path / "run" / "metrics.jsonl").touch()
    folder.check(changed)


def test_what_a_step_took_under_each_layout(tmp_path: Path):
    decision = replan(run(), NODE, 1)
    records = [record(decision, time=time) for time in (10.0, 20.0, 30.0)]
    (tmp_path / "slurm").mkdir()
    write_layouts(tmp_path, records)
    assert read_layouts(tmp_path) == records
    lines = [
        {"step": step, "time": time, "step_time_s": seconds, "data_wait_s": 0.25, "checkpoint_stall_s": 0.0}
        for step, (time, seconds) in enumerate([(11, 9.25), (12, 1.25), (13, 2.25), (14, 3.25), (25, 5.25)])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measured_steps(tmp_path, records) == [2.0, 5.0, None]
    assert measured_steps(tmp_path, records, lambda entry: entry["step"] != 3) == [1.5, 5.0, None]
    with (tmp_path / "metrics.jsonl").open("a") as file:  # of a disk that was full
        file.write('{"step": 5, "ti\n[]\n')
    assert measured_steps(tmp_path, records) == [2.0, 5.0, None]
    with (tmp_path / "slurm" / "layouts.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(UserError, match=r"layouts\.jsonl, line 4: time: missing; remove the line"):
        read_layouts(tmp_path)


def test_the_command_of_the_job_scripts(tmp_path: Path):
    cluster = json.loads((CONFIGS / "clusters" / "a100_80g_x128.json").read_text())
    cluster["nodes"][0]["devices_per_node"] = 1
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    elastic = {"max_nodes": 4, "cluster": str(tmp_path / "cluster.json")}
    config = write_tiny_config(tmp_path, m6__elastic=elastic)
    run_dir, out = tmp_path / "run", tmp_path / "layout"
    where = ("plan", "replan", config, "--run-dir", run_dir, "--ranks-per-node", 1, "--out", out)
    outcome = m6(*where, "--nodes", 3, "--set", "m6.training.seed=5")
    assert outcome.code == 0, outcome.stderr
    nodes, grow_at, grow_after_s = out.read_text().splitlines()[:3]
    assert outcome.stdout.startswith(f"{nodes} of 3 nodes: ")
    assert (grow_at, grow_after_s) == ("0", "0"), "not asked for"
    (first,) = read_layouts(run_dir)
    assert m6(*where, "--nodes", 3, "--failed").code == 0
    assert [(each.failed, each.available) for each in read_layouts(run_dir)] == [(True, 3), (False, 3)]
    assert read_layouts(run_dir)[1].layout != first.layout
    out.unlink()
    outcome = m6(*where, "--nodes", 3, "--set", "m6.elastic=null")
    assert (outcome.code, out.exists()) == (0, False), "the job scripts only guess which runs are elastic"
    assert "without m6.elastic the layout is that of the JSON" in outcome.stdout
    message = user_error(*where[:6], 2, "--nodes", 3)
    assert "expected one type of nodes with 2 devices, the ranks of a node of this job; found 1" in message


def test_a_layout_that_made_steps_of_the_pseudo_stage_is_not_blamed(tmp_path: Path):
    cluster = json.loads((CONFIGS / "clusters" / "a100_80g_x128.json").read_text())
    cluster["nodes"][0]["devices_per_node"] = 1
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    elastic = {"max_nodes": 4, "cluster": str(tmp_path / "cluster.json")}
    config = write_tiny_config(tmp_path, m6__elastic=elastic, m6__pseudo_to_real={"switch_step": 3})
    run_dir = tmp_path / "run"
    command = ("plan", "replan", config, "--run-dir", run_dir, "--ranks-per-node", 1, "--nodes", 3)
    assert m6(*command).code == 0
    [first] = read_layouts(run_dir)
    entry = {"step": 1, "time": first.time + 1, "step_time_s": 1.0, "data_wait_s": 0.0, "checkpoint_stall_s": 0.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps({**entry, "stage": {"name": "pseudo"}}) + "\n")
    for _ in range(2):  # an attempt at the same layout that makes no step, too
        assert m6(*command, "--failed").code == 0
    records = read_layouts(run_dir)
    assert [each.failed for each in records] == [False] * 3
    assert [each.layout for each in records] == [first.layout] * 3


def test_a_machine_without_a_known_network_needs_a_description():
    with pytest.raises(UserError, match=r"m6\.elastic\.cluster is missing: CPU core is known without a network"):
        node_of(run(), 1)
