"""The prediction in a run's folder, and what measurements make of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import load_config
from m6.errors import UserError
from m6.files import write_json
from m6.planning.machine.profile import Profile, load_profile, save_profile
from m6.planning.prediction import (
    announce,
    describe_memory,
    outcome_line,
    predict_memory,
    read_outcome,
    refit,
    validation_table,
)
from m6.training.sizes import BatchShape
from tests.fixtures.command import m6, user_error

CONFIG = Path(__file__).parents[3] / "configs" / "m6_smoke.json"

SHAPE = BatchShape(samples=4, rows=4, sequence_length=256, real=900, targets=500, pictures=3)


def finished_run(folder: Path, seconds: float, **changes: Any) -> Path:
    folder.mkdir()
    config = load_config(CONFIG, tuple(f"{key}={value}" for key, value in changes.items()))
    assert announce(folder, config, 1, SHAPE, Profile()).startswith("plan: world 1")
    lines = [
        {
            "step": step,
            "step_time_s": seconds * (5 if step == 1 else 1) + 0.75,
            "data_wait_s": 0.5,
            "checkpoint_stall_s": 0.25,
            "memory_bytes": 10**9,
        }
        for step in (1, 2, 3)
    ]
    write_json(folder / "config.json", config.document)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_keeps_its_prediction(tmp_path: Path):
    run = finished_run(tmp_path / "one", 2.0)
    found = read_outcome(run)
    assert (found.measured_s, found.measured_bytes) == (2.0, 10**9)  # without the first step, which warms up, and waits
    assert sum(found.parts.values()) > 0
    assert outcome_line(run).startswith("measured: 2 s a step, memory"), "nothing measured this CPU"
    assert outcome_line(tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", None),
        ("metrics.jsonl", b'{"step": 1, "step_time_s": 2.0}\n'),
        ("metrics.jsonl", b"[" * 100_000),
        ("plan.json", b"[]"),
        ("plan.json", b"{}"),
        ("plan.json", b"\xff"),
    ],
)
def test_a_finished_run_does_not_fail_for_want_of_a_prediction(tmp_path: Path, name: str, content: bytes | None):
    run = finished_run(tmp_path / "one", 2.0)
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    assert outcome_line(run) == ""


def test_seconds_of_a_cpu_are_predicted_from_measurements_alone(tmp_path: Path):
    config = load_config(CONFIG)
    assumed = announce(tmp_path, config, 1, SHAPE, Profile())
    assert " s a step" not in assumed
    assert "need a profile of `m6 plan calibrate`" in assumed
    for profile in (Profile(calibrated=True), refit(Profile(), [read_outcome(finished_run(tmp_path / "run", 2.0))])):
        assert " s a step, memory at most" in announce(tmp_path, config, 1, SHAPE, profile)
    (tmp_path / "run" / "plan.json").write_bytes((tmp_path / "plan.json").read_bytes())
    assert outcome_line(tmp_path / "run").startswith("measured: 2 s a step (plan ")


def test_runs_improve_a_profile(tmp_path: Path):
    runs = [
        finished_run(tmp_path / str(rows), seconds, train_batch_size=rows, train_micro_batch_size_per_gpu=rows)
        for rows, seconds in ((4, 1.0), (8, 2.0), (16, 4.0))
    ]
    outcomes = [read_outcome(run) for run in runs]
    better = refit(Profile(), outcomes)
    table = validation_table(outcomes, better)
    assert "Kendall's tau 1.00, regret 0.0%." in table
    for each in outcomes:
        assert abs(each.seconds(better) / each.measured_s - 1) < 0.3
        assert abs(each.bytes(better) / each.measured_bytes - 1) < 0.3
    save_profile(better, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == better


def test_another_profile_predicts_the_seconds_of_a_run_anew(tmp_path: Path):
    run = finished_run(tmp_path / "run", 2.0)
    assert read_outcome(run, Profile()).parts == pytest.approx(read_outcome(run).parts, rel=1e-12)
    slow = Profile(matmul_efficiency=0.07, calibrated=True)
    first, again = read_outcome(run), read_outcome(run, slow)
    assert again.parts["matmul"] > 3 * first.parts["matmul"]
    assert {name: again.parts[name] for name in ("exchange", "host")} == {
        name: first.parts[name] for name in ("exchange", "host")
    }
    with_factor = slow.model_copy(update={"factors": {"matmul": 2.0}})
    outcome = read_outcome(run, with_factor)
    assert outcome.parts == again.parts, "factors are applied once"
    announced = tmp_path / "announced"
    announced.mkdir()
    announce(announced, load_config(CONFIG), 1, SHAPE, with_factor)
    seconds = json.loads((announced / "plan.json").read_text())["seconds"]
    assert outcome.seconds(with_factor) == pytest.approx(sum(seconds.values()), rel=1e-12)


def test_the_command_predicts_with_the_profile_that_it_is_given(tmp_path: Path):
    run = finished_run(tmp_path / "tour", 2.0)
    save_profile(Profile(matmul_efficiency=0.007, calibrated=True), tmp_path / "profile.json")
    predicted = []
    for options in ((), ("--profile", tmp_path / "profile.json")):
        outcome = m6("plan", "validate", run, *options)
        assert outcome.code == 0, outcome
        row = next(line for line in outcome.stdout.splitlines() if line.startswith("| tour |"))
        predicted.append(float(row.split("|")[3]))
    assert predicted[1] > 3 * predicted[0]


def test_factors_fit_the_rates_that_they_are_saved_with(tmp_path: Path):
    """Those of the new profile, whatever rates the run was predicted with at its start."""
    run = finished_run(tmp_path / "run", 2.0)
    slow = Profile(matmul_efficiency=0.007, calibrated=True)
    config = load_config(CONFIG)
    announce(run, config, 1, SHAPE, slow)
    new = tmp_path / "new.json"
    assert m6("plan", "validate", run, "--refit", new).code == 0
    assert load_profile(new) == refit(Profile(), [read_outcome(run, Profile())])
    assert load_profile(new) != refit(Profile(), [read_outcome(run)])


def test_a_profile_is_not_replaced_by_assumed_rates(tmp_path: Path):
    run = finished_run(tmp_path / "run", 2.0)
    profile = tmp_path / "profile.json"
    save_profile(Profile(source="this machine", calibrated=True), profile)
    message = user_error("plan", "validate", run, "--refit", profile)
    assert f"--refit {profile}: exists; choose a new file, or give the profile to fit with --profile" in message
    assert load_profile(profile).factors == {}
    assert m6("plan", "validate", run, "--profile", profile, "--refit", profile).code == 0
    assert load_profile(profile).calibrated
    assert load_profile(profile).factors


def test_an_older_run_cannot_be_predicted_anew(tmp_path: Path):
    run = finished_run(tmp_path / "run", 2.0)
    plan = json.loads((run / "plan.json").read_text())
    del plan["cluster"]
    (run / "plan.json").write_text(json.dumps(plan))
    assert read_outcome(run).measured_s == 2.0
    with pytest.raises(UserError, match=r"plan.json: has no cluster and no batch to predict the run again"):
        read_outcome(run, Profile())


def test_an_older_run_has_old_names_in_its_layout(tmp_path: Path):
    run = finished_run(tmp_path / "run", 2.0)
    plan = json.loads((run / "plan.json").read_text())
    del plan["layout"]["overlap_micro_batches"]
    plan["layout"]["micro_batches_at_once"] = 2
    (run / "plan.json").write_text(json.dumps(plan))
    assert read_outcome(run).layout["overlap_micro_batches"] == 2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layout", None),
        ("layout", {"ep_size": 1}),
        ("layout.zero_stage", "two"),
        ("cluster.nodes", "many"),
        ("batch.rows", None),
        ("factors", {"compute": 0}),
        ("seconds", [1.0]),
        ("seconds.compute", "fast"),
        ("bytes", {}),
        ("activation_factor", 0),
        ("memory_bytes", "1 GB"),
    ],
)
def test_a_prediction_of_another_type(tmp_path: Path, key: str, value: object):
    run = finished_run(tmp_path / "run", 2.0)
    plan = json.loads((run / "plan.json").read_text())
    *parents, last = key.split(".")
    node = plan
    for parent in parents:
        node = node[parent]
    node[last] = value
    (run / "plan.json").write_text(json.dumps(plan))
    assert f"{run / 'plan.json'}: not readable: {key}" in user_error("plan", "validate", run)


def test_measurements_of_another_type(tmp_path: Path):
    run = finished_run(tmp_path / "run", 2.0)
    (run / "metrics.jsonl").write_text('{"step": 1, "step_time_s": "long"}\n')
    assert "metrics.jsonl, line 1: corrupt: step_time_s is 'long'" in user_error("plan", "validate", run)
    (run / "metrics.jsonl").write_text('{"step": 1, "step_time_s": 2.0}\n')
    assert 'corrupt: an entry has no "data_wait_s"' in user_error("plan", "validate", run)


def test_a_run_without_a_prediction(tmp_path: Path):
    with pytest.raises(UserError, match=r"plan.json: no such file; `m6 pretrain` writes it"):
        read_outcome(tmp_path)


def test_the_memory_of_a_run_in_words():
    config = load_config(CONFIG)
    predicted = predict_memory(config, 1, SHAPE)
    text = describe_memory(predicted)
    total = predicted.weights + predicted.gradients + predicted.optimizer_state + predicted.activations
    for number in (total, predicted.weights, predicted.gradients, predicted.optimizer_state, predicted.activations):
        assert f"{number / 2**20:,.1f} MiB" in text
    with pytest.raises(UserError, match="ep_size 2 does not divide the world size 1"):
        predict_memory(load_config(CONFIG, ("m6.training.ep_size=2",)), 1, SHAPE)
