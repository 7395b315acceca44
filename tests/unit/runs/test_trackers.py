"""What the trackers are shown."""

from pathlib import Path

import pytest
from PIL import Image

from m6.config.sections import LoggingSettings
from m6.runs.directory import RunDirectory
from m6.runs.trackers import Trackers


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "grid.png"
    Image.new("RGB", (6, 4), "red").save(path)
    return path


def test_pictures_reach_tensorboard(tmp_path: Path, picture: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    trackers = Trackers(run, LoggingSettings(tensorboard=True), {})
    trackers.write({"step": 7, "loss": 1.0})
    trackers.show("samples", picture, 7)
    trackers.close()
    events = EventAccumulator(str(run.root / "tensorboard")).Reload()
    [shown] = events.Images("samples")
    assert (shown.step, shown.width, shown.height) == (7, 6, 4)


def test_pictures_reach_wandb(tmp_path: Path, picture: Path):
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    trackers = Trackers(run, LoggingSettings(wandb="offline"), {})
    trackers.write({"step": 7, "loss": 1.0})
    trackers.show("samples", picture, 7)
    trackers.close()
    [kept] = (run.root / "wandb").rglob("media/images/*.png")
    assert Image.open(kept).size == (6, 4)
