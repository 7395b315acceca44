"""Scores, fitted factors, and the prediction that lies beside a run."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import load_config
from m6.errors import UserError
from m6.planning.cost.batch_shape import BatchShape
from m6.planning.machine.detection import detect_cluster
from m6.planning.machine.fitting import fit_factors, fit_memory, kendall_tau, regret
from m6.planning.machine.profile import PARTS, Profile, load_profile, save_profile
from m6.planning.prediction import announce, outcome_line, read_outcome, refit, validation_table

CONFIG = Path(__file__).parents[3] / "configs" / "m6_smoke.json"
SHAPE = BatchShape(samples=4, rows=4, sequence_length=256, real=900, targets=500, pictures=3)


def test_scores():
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([4, 3, 2, 1], [10, 20, 30, 40]) == -1
    assert kendall_tau([1, 3, 2], [1, 2, 3]) == pytest.approx(1 / 3)
    assert regret([1.0, 2.0], [3.0, 2.0]) == pytest.approx(0.5)
    assert regret([2.0, 1.0], [3.0, 2.0]) == 0


def test_factors_are_found_again():
    generator = random.Random(0)
    truth = {"matmul": 1.7, "experts": 0.6, "exchange": 3.0}
    runs = [{part: generator.random() for part in (*truth, "bubble")} for _ in range(200)]
    measured = [sum(value * truth.get(part, 1.0) for part, value in run.items()) for run in runs]
    found = fit_factors(runs, measured)
    # The pull to 1 keeps a few percent back.
    assert {part: found[part] for part in truth} == pytest.approx(truth, rel=0.1)  # type: ignore[index]
    assert all(found[part] == pytest.approx(1) for part in PARTS if part not in truth)


def test_memory_of_the_process_is_found_again():
    generator = random.Random(1)
    states, activations = ([generator.uniform(1e8, 2e9) for _ in range(30)] for _ in range(2))
    measured = [8e8 + s + 0.7 * a for s, a in zip(states, activations, strict=True)]
    constant, factor = fit_memory(states, activations, measured, 5e8)
    # The pull to what was calibrated keeps a little back.
    assert (constant, factor) == pytest.approx((8e8, 0.7), rel=0.02)
    assert fit_memory([], [], [], 5e8) == pytest.approx((5e8, 1.0))


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
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_keeps_its_prediction(tmp_path: Path):
    run = finished_run(tmp_path / "one", 2.0)
    found = read_outcome(run)
    assert (found.measured_s, found.measured_bytes) == (2.0, 10**9)  # without the first step, which warms up, and waits
    assert sum(found.parts.values()) > 0
    assert outcome_line(run).startswith("measured: 2 s a step (plan ")
    assert outcome_line(tmp_path) == ""


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


def test_bad_runs_and_profiles(tmp_path: Path):
    with pytest.raises(UserError, match=r"plan.json: no such file; `m6 pretrain` writes it"):
        read_outcome(tmp_path)
    (tmp_path / "profile.json").write_text('{"kernels": 1}')
    with pytest.raises(UserError, match=r"profile.json: kernels: unknown key"):
        load_profile(tmp_path / "profile.json")
    with pytest.raises(UserError, match=r"no such file; `m6 plan calibrate"):
        load_profile(tmp_path / "none.json")


def test_the_machine_at_hand(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="CPU core has no network"):
        detect_cluster(4)
    assert detect_cluster(2).num_devices == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Quantum 9")
    with pytest.raises(UserError, match="device 'Quantum 9' is in no description"):
        detect_cluster(2)
