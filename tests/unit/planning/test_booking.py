"""Days, GPU-days and jobs of a plan, against sums by hand."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from m6.cli.plan import app
from m6.config.run import load_config
from m6.planning.booking import book_stage, booking, booking_table
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.profile import Profile
from m6.planning.search.job_files import checkpoint_s, signal_lead_s
from m6.planning.search.planner import Planner
from m6.planning.search.stages import stage_samples, stage_steps, training_stages
from m6.training.reporting.interval import training_flops
from tests.fixtures.plans import small_base

CONFIGS = Path(__file__).parents[3] / "configs"
CHEAP = {"zero_stage": 2, "offload_params": False, "tp_size": 1, "pp_size": 1, "offload_optimizer": False}
PSEUDO = ('m6.pseudo_to_real={"switch_step": 30000}', "zero_optimization.stage=2")


def planner(*overrides: str) -> Planner:
    config = load_config(CONFIGS / "papers" / "m6t_base.json", ("train_batch_size=128", *overrides))
    return Planner(config, load_cluster(Path("a100_80g_x128")).first(8), forced=CHEAP)


def test_the_cost_of_a_stage():
    plan = planner().search().best
    found = book_stage(planner(), plan, 1440)
    steps, seconds = planner().config.m6.training.total_steps, plan.time.total
    assert (found.stage, found.steps, found.step_s) == ("real", steps, seconds)
    assert found.days == pytest.approx(steps * seconds / 86400)
    assert found.gpu_days == pytest.approx(8 * found.days)
    assert found.samples_per_s == pytest.approx(128 / seconds)
    assert found.jobs == math.ceil(steps * seconds / (86400 - signal_lead_s(planner(), plan)))
    assert found.step_s_range[0] < seconds < found.step_s_range[1]
    assert found.days_range == pytest.approx([steps * bound / 86400 for bound in found.step_s_range])
    assert found.exposed_s == pytest.approx(plan.time.exchange + plan.time.reduction)
    assert found.parts[found.limited_by] == max(found.parts.values())
    config, length = planner().config, planner().config.m6.data.sequence_length
    flops = training_flops(config.model, 128 * length, 128 * length, 128, 128 * length**2)
    # The planner counts all pairs of tokens in attention, as the kernel does.
    assert found.mfu == pytest.approx(flops / (8 * 312e12 * seconds), rel=0.1)


def test_checkpoints_for_which_the_training_waits_count():
    waiting = planner("m6.checkpoint.async_save=false", "m6.checkpoint.interval_steps=10")
    plan = waiting.search().best
    found, steps = book_stage(waiting, plan, 1440), waiting.config.m6.training.total_steps
    assert found.days == pytest.approx(steps * (plan.time.total + checkpoint_s(waiting, plan) / 10) / 86400)
    assert found.days_range[0] == pytest.approx(found.days - steps * (plan.time.total - found.step_s_range[0]) / 86400)


def test_a_checkpoint_that_takes_longer_than_the_steps_until_the_next():
    plan = planner().search().best
    often = planner("m6.checkpoint.interval_steps=1", f"m6.checkpoint.async_save={json.dumps(True)}")
    seconds, checkpoint = plan.time.total, checkpoint_s(often, plan)
    steps = often.config.m6.training.total_steps
    found = book_stage(often, plan, 1440)
    assert found.days == pytest.approx(steps * max(seconds, checkpoint) / 86400)
    assert found.days_range == pytest.approx([steps * max(bound, checkpoint) / 86400 for bound in found.step_s_range])


def test_steps_of_a_ramp_have_fewer_samples():
    ramp = 'm6.training.batch_ramp=[{"batch_size": 32, "steps": 1000}, {"batch_size": 64, "steps": 500}]'
    growing = planner(ramp)
    plan = growing.search().best
    found, steps = book_stage(growing, plan, 1440), growing.config.m6.training.total_steps
    whole = 1000 / 4 + 500 / 2 + steps - 1500
    assert found.days == pytest.approx(whole * plan.time.total / 86400)
    assert booking([found], growing)["samples"] == 128 * whole
    first, last = training_stages(planner(ramp, *PSEUDO))
    assert (stage_samples(first), stage_samples(last)) == (128 * (30000 - 1000), 128 * (steps - 30000))


def test_a_time_limit_too_short_for_a_step_and_a_checkpoint():
    booked = book_stage(planner(), planner().search().best, 1)
    assert booked.jobs is None
    assert booking([booked], planner())["jobs"] is None
    assert "| none is long enough |" in booking_table([booked], planner(), 1)


def test_both_stages_add_up():
    stages = training_stages(planner(*PSEUDO))
    assert [stage_steps(stage) for stage in stages] == [30000, stages[0].config.m6.training.total_steps - 30000]
    booked = [book_stage(stage, stage.search().best, 1440) for stage in stages]
    total = booking(booked, stages[-1])
    assert [stage["stage"] for stage in total["stages"]] == ["pseudo", "real"]
    for name in ("days", "gpu_days", "jobs"):
        assert total[name] == pytest.approx(sum(stage[name] for stage in total["stages"]))
    assert total["samples"] == 128 * stages[-1].config.m6.training.total_steps
    assert total["samples_per_s"] == pytest.approx(total["samples"] / total["days"] / 86400)
    assert total["device_gb"] == max(stage.device_gb for stage in booked)
    assert json.loads(json.dumps(total))["days_range"][0] < total["days"] < total["days_range"][1]
    table = booking_table(booked, stages[-1], 1440)
    assert "| pseudo | 30,000 |" in table
    assert "| **in all** |" in table


def test_the_command_prints_json_alone():
    arguments = [str(CONFIGS / "papers" / "m6t_base.json"), "--cluster", "a100_80g_x128", "--world", "8", "--json"]
    forced = [part for name, value in CHEAP.items() for part in ("--force", f"{name}={str(value).lower()}")]
    result = CliRunner().invoke(app, [*arguments, "--set", "train_batch_size=128", *forced], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert document["devices"] == 8
    assert document["calibrated"] is False
    assert document["stages"][0]["layout"].startswith("world 8, ")


@pytest.mark.parametrize(
    ("forced", "error"),
    [
        ({"checkpointing": False}, 0.30),
        ({"checkpointing": True}, 0.84),
        ({"checkpointing": False, "offload_optimizer": True}, 4.07),
    ],
)
def test_ranges_are_as_wide_as_the_errors_that_were_seen(forced: dict[str, bool], error: float):
    """Against scripts/benchmarks/results/gpu_training.md: 0.245 s for 0.189, 0.413 for 0.225, 8.1 for 1.6."""
    forced = {"offload_optimizer": False, "offload_params": False, "stream_experts": False, "pp_size": 1} | forced
    subject = Planner(small_base(16), load_cluster(Path("h100_x128")).first(8), forced=forced)
    plan = subject.search().best
    booked = book_stage(subject, plan, 1440)
    assert booked.step_s_range[1] >= (1 + error) * booked.step_s
    assert booked.days_range[1] >= (1 + error) * booked.days * 0.99
    assert booked.step_s_range[0] < booked.step_s
    text = booking_table([booked], subject, 1440)
    assert "Nothing of the kind has run" in text
    assert f"up to {error:.0%} longer than predicted" in text
    # Once factors are fitted to runs, the range is theirs.
    fitted = subject.changed(profile=Profile(calibrated=True, factors={"matmul": 1.0}))
    own = book_stage(fitted, fitted.search().best, 1440)
    assert own.step_s_range[1] == pytest.approx(1.2 * own.step_s, rel=0.02)
    assert "factors were fitted to runs" in own.range_source
