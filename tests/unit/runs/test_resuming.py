"""What an attempt says of a folder that a person has changed, and where it goes on."""

import shutil
from pathlib import Path

from m6.checkpoints.discovery import complete_checkpoints
from tests.fixtures.command import m6
from tests.fixtures.tiny_run import write_tiny_config


def test_a_copied_checkpoint_and_lost_metrics(tmp_path: Path):
    """The copy is set aside, once: with its name it would be the newest one for ever."""
    config, run = write_tiny_config(tmp_path), tmp_path / "run"
    arguments = ("pretrain", config, "--run-dir", run, "--set", "m6.training.total_steps=")
    assert m6(*arguments[:-1], f"{arguments[-1]}2").code == 0
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step_00000002", checkpoints / "step_00000099")
    (run / "metrics.jsonl").unlink()
    outcome = m6(*arguments[:-1], f"{arguments[-1]}4")
    assert outcome.code == 0, outcome
    assert "step_00000099: holds the checkpoint of step 2, not that of its name" in outcome.stderr
    assert "metrics.jsonl is missing, but the checkpoint is of step 2" in outcome.stderr
    assert f"resumed {run} at step 2" in outcome.stderr
    assert [folder.name for folder in complete_checkpoints(checkpoints)] == ["step_00000002", "step_00000004"]
    assert (checkpoints / "corrupt_step_00000099" / "manifest.json").is_file()
