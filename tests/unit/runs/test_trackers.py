"""What the trackers are shown."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from m6.config.sections import LoggingSettings
from m6.errors import StorageError, UserError
from m6.runs.directory import RunDirectory
from m6.runs.trackers import Trackers, check_trackers


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


def records_of(run: Path) -> Iterator[Any]:
    """What one attempt after the other has written for Weights & Biases, in files of less than a block of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        content, place = file.read_bytes(), 7  # after ":W&B" and the format's version
        assert len(content) < 2**15
        while place < len(content):  # LevelDB's log: checksum, length, kind, and the record
            _, length, kind = struct.unpack_from("<IHB", content, place)
            assert kind == 1  # a whole record
            place += 7
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content[place : place + length])
            place += length
            yield record


def test_steps_that_an_attempt_repeats_reach_wandb(tmp_path: Path, picture: Path):
    """The service takes no row whose number is smaller than that of one before, so rows must not have ours."""
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    attempts = ((7, 8, 9), (8, 9, 10))  # the second goes on from the checkpoint of step 7
    for steps in attempts:
        trackers = Trackers(run, LoggingSettings(wandb="offline"), {}, steps[0] - 1)
        for step in steps:
            trackers.write({"step": step, "loss": 1.0 * step, "objectives": {"captioning": 2.0 * step}})
        trackers.show("samples", picture, steps[-1])
        trackers.close()
        time.sleep(1.1)  # the package names the folders of attempts by the second
    records = list(records_of(run.root))
    rows = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    shown = [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]
    losses = [row["step"] for row in shown if "loss" in row]
    assert losses == [7, 8, 9, 8, 9, 10]
    assert [row["step"] for row in shown if any(key.startswith("samples") for key in row)] == [9, 10]
    # Rows are numbered by the package, which goes on counting where the service says that the run has ended.
    numbers = [row["_step"] for row in shown]
    assert numbers == [0, 1, 2, 3] * 2
    metrics = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert {(metric.name, metric.glob_name, metric.step_metric) for metric in metrics} >= {("", "*", "step")}


def test_the_id_in_wandb_is_that_of_the_folder(tmp_path: Path):
    settings = LoggingSettings(wandb="offline", wandb_name="first try", wandb_group="sweep")
    ids = []
    for parent in ("a", "b", "a"):
        run = RunDirectory(tmp_path / parent / "run")
        run.root.mkdir(parents=True, exist_ok=True)
        Trackers(run, settings, {}).close()
        ids.append((run.root / "wandb_id").read_text().strip())
        assert all(ids[-1] in folder.name for folder in (run.root / "wandb").glob("offline-run-*"))
    assert ids[0] == ids[2] != ids[1]


ONLINE = LoggingSettings(wandb="online")


@pytest.fixture
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A user who never logged in to Weights & Biases."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def test_wandb_online_needs_a_key(nobody: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(UserError, match=r'm6\.logging\.wandb "online": there is no API key; run "wandb login"'):
        check_trackers(ONLINE, with_credentials=True)
    check_trackers(ONLINE, with_credentials=False)
    nobody.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match="WANDB_API_KEY invalid: API key must have 40"):
        check_trackers(ONLINE, with_credentials=True)
    nobody.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'0' * 40}\n")
    check_trackers(ONLINE, with_credentials=True)


def test_the_mode_of_the_environment_wins(nobody: pytest.MonkeyPatch, tmp_path: Path):
    nobody.setenv("WANDB_MODE", "online")
    check_trackers(LoggingSettings(), with_credentials=True)
    with pytest.raises(UserError, match="there is no API key"):
        check_trackers(LoggingSettings(wandb="offline"), with_credentials=True)
    nobody.setenv("WANDB_MODE", "offlin")
    with pytest.raises(UserError, match="WANDB_MODE is 'offlin'; did you mean \"offline\""):
        check_trackers(ONLINE, with_credentials=True)
    nobody.setenv("WANDB_MODE", "disabled")
    check_trackers(ONLINE, with_credentials=True)
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    trackers = Trackers(run, ONLINE, {})
    trackers.write({"step": 7, "loss": 1.0})
    trackers.close()
    assert {path.name for path in run.root.iterdir()} == {"metrics.jsonl", "wandb_id"}


def test_a_service_that_cannot_be_reached_ends_no_run(
    nobody: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import wandb

    init = wandb.init

    def fail_online(**settings: Any) -> object:
        if settings["mode"] == "online":
            raise wandb.errors.CommError("no route")
        return init(**settings)

    nobody.setattr(wandb, "init", fail_online)
    trackers = Trackers(RunDirectory(tmp_path), ONLINE, {})
    assert "warning: m6.logging.wandb: no route; this attempt writes into" in capsys.readouterr().out
    trackers.write({"step": 7, "loss": 1.0})
    trackers.close()
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_a_service_that_refuses_the_run(nobody: pytest.MonkeyPatch, tmp_path: Path):
    import wandb

    def refuse(**settings: object) -> None:
        raise wandb.errors.AuthenticationError("unknown key")

    nobody.setattr(wandb, "init", refuse)
    with pytest.raises(StorageError, match=r"m6\.logging\.wandb: unknown key"):
        Trackers(RunDirectory(tmp_path), ONLINE, {})
