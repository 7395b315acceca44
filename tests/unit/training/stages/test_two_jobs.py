"""A Pseudo-to-Real run of two jobs: the first ends at the switch, the second has another layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from m6.checkpoints.format import CheckpointReader
from m6.training.loop import Trainer
from tests.fixtures.command import m6
from tests.fixtures.tiny_run import write_tiny_config

MakeTrainer = Callable[..., Trainer]
STEPS, SWITCH = 6, 3
BOTH = {"m6__model__num_layers": 4, "m6__training__total_steps": STEPS, "m6__checkpoint__interval_steps": 2}
WHOLE = {**BOTH, "m6__pseudo_to_real": {"switch_step": SWITCH}}
PSEUDO = {**BOTH, "m6__pseudo_to_real": {"switch_step": SWITCH, "stop_at_switch": True}}
OTHER_LAYOUT = {"zero_optimization__stage": 1, "m6__training__activation_checkpointing": True}
MEASURED = ("step", "loss", "aux_loss", "objectives", "learning_rate", "grad_norm", "tokens_seen")


def entries(root: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def weights(root: Path) -> CheckpointReader:
    return CheckpointReader(root / "checkpoints" / f"step_{STEPS:08d}")


def test_two_jobs_of_one_layout_are_equal_to_one_to_the_bit(make_trainer: MakeTrainer):
    whole = make_trainer("whole", **WHOLE)
    assert whole.train()
    assert not make_trainer(**PSEUDO).train()
    real = make_trainer(**WHOLE)
    assert not real.stage.is_pseudo
    assert real.train()
    ours, theirs = entries(real.run.root), entries(whole.run.root)
    assert [[line[key] for key in MEASURED] for line in ours] == [[line[key] for key in MEASURED] for line in theirs]
    assert [line["stage"]["name"] for line in ours] == ["pseudo"] * SWITCH + ["real"] * (STEPS - SWITCH)
    a, b = weights(real.run.root), weights(whole.run.root)
    assert a.shapes == b.shapes
    assert all(torch.equal(a.read(*key), b.read(*key)) for key in a.shapes)


def test_two_jobs_of_two_layouts_are_equal_but_for_rounding(make_trainer: MakeTrainer):
    """ZeRO 1 adds gradients up in another order: the tolerance of the tests of layouts."""
    whole = make_trainer("whole", **WHOLE)
    whole.train()
    make_trainer(**PSEUDO).train()
    real = make_trainer(**WHOLE, **OTHER_LAYOUT)
    assert real.train()
    ours, theirs = entries(real.run.root), entries(whole.run.root)
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
    assert [line["learning_rate"] for line in ours] == [line["learning_rate"] for line in theirs]


def test_a_rule_that_ends_the_stage_early_ends_the_job(make_trainer: MakeTrainer):
    rule = {"switch": "gradient_correlation", "correlation_interval_steps": 2, "correlation_checks": 1}
    section = {"switch_step": 5, "correlation_threshold": 1.0, **rule}
    trainer = make_trainer(**{**BOTH, "m6__pseudo_to_real": {**section, "stop_at_switch": True}})
    assert not trainer.train()
    assert (trainer.step, trainer.stage.switch_step) == (2, 2)


def test_the_commands_of_both_jobs(folder: Path, tmp_path: Path):
    pseudo = write_tiny_config(folder, "pseudo.json", **PSEUDO)
    real = write_tiny_config(folder, "real.json", **WHOLE, **OTHER_LAYOUT)
    run = tmp_path / "run"
    over = f"the Pseudo stage of {run} is over at step {SWITCH}: the JSON of the Real stage goes on"

    def pretrain(config: Path, is_over: bool) -> str:
        with mock.patch("m6.cli.main.report_to_job") as told:  # writes to the folder of a Slurm job's attempt
            outcome = m6("pretrain", config, "--run-dir", run)
        assert outcome.code == 0, outcome.stderr
        assert told.mock_calls == [mock.call(over, "over")] * is_over
        return outcome.stderr

    said = pretrain(pseudo, True)
    assert said.endswith(over + "\n")
    assert "Pseudo stage, memory of the fullest rank" in said
    assert "Real stage, memory" not in said
    before = (run / "metrics.jsonl").read_bytes()
    # A further job of the Pseudo stage has nothing to do, before the Real one begins and after.
    assert pretrain(pseudo, True) == over + "\n"
    assert (run / "metrics.jsonl").read_bytes() == before
    pretrain(real, False)
    assert (run / "DONE").read_text() == f"{STEPS}\n"
    assert pretrain(pseudo, True) == over + "\n"
    assert (run / "DONE").exists()


def test_the_job_of_the_real_stage_may_come_first(make_trainer: MakeTrainer):
    """For example in the place of a first job that lost its nodes: it also trains the rest of the Pseudo stage."""
    whole = make_trainer("whole", **WHOLE)
    whole.train()
    make_trainer(**PSEUDO).train(stop_after=2)
    real = make_trainer(**WHOLE)
    assert real.stage.is_pseudo
    assert real.train()
    assert [line["loss"] for line in entries(real.run.root)] == [line["loss"] for line in entries(whole.run.root)]
