"""Nothing of a run is lost in silence: one owner, no restart unasked, no damaged metrics or weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from m6.checkpoints.discovery import complete_checkpoints
from m6.config.run import load_config, parse_config
from m6.errors import StorageError, UserError
from m6.runs.directory import LAST_CHECKPOINT, RunDirectory
from m6.runs.processes import Runtime
from m6.training.loop import Trainer, pretrain
from m6.training.reporting.nonfinite import find_nonfinite_state
from tests.fixtures.command import contents, user_error
from tests.fixtures.tiny_data import ROWS, build_tiny_codes, build_tiny_data
from tests.fixtures.tiny_run import tiny_document, write_tiny_config

ROOT = Path(__file__).resolve().parents[3]
HOLDER = """
import sys, time
from pathlib import Path
from m6.runs.directory import RunDirectory
RunDirectory(Path(sys.argv[1])).lock.acquire()
print("held", flush=True)
time.sleep(120)
"""

MakeTrainer = Callable[..., Trainer]


def losses(root: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_run_that_another_process_trains_is_left_alone(folder: Path, runtime: Runtime, tmp_path: Path):
    config, root = parse_config(tiny_document(folder)), tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, root]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StorageError, match=rf"being written by process {holder.pid} on"):
            pretrain(config, root, runtime)
        assert [path.name for path in root.iterdir()] == ["lock"]
        holder.kill()
    assert pretrain(config, root, runtime)


@pytest.mark.slow
def test_of_two_trainers_that_start_at_once_one_trains(folder: Path, tmp_path: Path):
    config = write_tiny_config(folder, "long.json", m6__training__total_steps=100_000, m6__schedule__decay="constant")
    command = [sys.executable, "-m", "m6", "pretrain", config, "--run-dir", tmp_path / "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    trainers: dict[subprocess.Popen[bytes], Path] = {}
    for name in ("one", "two"):
        with (tmp_path / name).open("w") as printed:
            trainers[subprocess.Popen(command, env=environment, stderr=printed)] = tmp_path / name
    try:
        while all(trainer.poll() is None for trainer in trainers):
            time.sleep(0.1)
        owner, other = sorted(trainers, key=lambda trainer: trainer.poll() is not None)
        message = trainers[other].read_text().splitlines()[-1]
        assert other.returncode == 2, message
        # The owner says its name after it has the lock.
        names = (f"process {owner.pid} on ", "another process, which has not yet said its name")
        assert any(f"is being written by {name}" in message for name in names), message
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert owner.poll() is None
            time.sleep(0.1)
        owner.send_signal(signal.SIGTERM)
        assert owner.wait(600) == 0, trainers[owner].read_text()
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
    steps = [step for step, _ in losses(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_unasked(folder: Path, runtime: Runtime, tmp_path: Path):
    config, root = parse_config(tiny_document(folder)), tmp_path / "run"
    assert pretrain(config, root, runtime)
    before = losses(root)
    (root / "checkpoints").rename(tmp_path / "unmounted")
    with pytest.raises(
        UserError, match=r"was saved as step_\d+, but .*checkpoints holds no whole checkpoint.*--restart"
    ):
        pretrain(config, root, runtime)
    assert losses(root) == before
    (tmp_path / "unmounted").rename(root / "checkpoints")
    assert pretrain(config, root, runtime)
    assert losses(root) == before


def test_a_restart_keeps_what_was_there(folder: Path, runtime: Runtime, tmp_path: Path):
    config, root = parse_config(tiny_document(folder)), tmp_path / "run"
    assert pretrain(config, root, runtime)
    before = losses(root)
    (root / "wandb_id").write_text("0123456789abcdef\n")
    of_steps = {"tensorboard", "samples", "offload", "nonfinite"}
    for name in of_steps:
        (root / name).mkdir()
    (root / "initial.json").write_text("{}")
    (root / "before_restart_004").mkdir()  # a person removed those before it
    assert pretrain(config, root, runtime, restart=True)
    assert losses(root) == before
    kept = root / "before_restart_005"
    assert losses(kept) == before
    assert complete_checkpoints(kept / "checkpoints")
    assert (kept / "wandb_id").exists()
    assert {"sources.json", "initial.json", *of_steps} <= {path.name for path in kept.iterdir()}
    assert (root / "sources.json").exists()
    assert not any((root / name).exists() for name in ("wandb_id", "initial.json", *of_steps))


def test_no_tracker_stays_open_if_an_attempt_cannot_begin(
    folder: Path, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trackers = mock.Mock()
    monkeypatch.setattr("m6.training.loop.Trackers", trackers)
    monkeypatch.setattr(Trainer, "_open_sample_grids", mock.Mock(side_effect=UserError("no image tokenizer")))
    with pytest.raises(UserError, match="no image tokenizer"):
        pretrain(parse_config(tiny_document(folder)), tmp_path / "run", runtime)
    assert trackers.call_count == trackers.return_value.close.call_count


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    """The tiny data and tokenizer, which the test may change."""
    tiny_document(folder)
    for name in ("data", "tokenizer"):
        shutil.copytree(folder / name, tmp_path / name)
    return tmp_path


def build_again(data: Path, rows: int) -> None:
    shutil.rmtree(data)
    with mock.patch.dict(ROWS, train=rows):
        build_tiny_data(data)


def change_sources(data: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((data / "manifest.json").read_text())
    change(manifest["sources"])
    (data / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: build_again(data, ROWS["train"] // 2), 'source "tiny_shapes" has other training rows'),
        (
            lambda data: change_sources(data, lambda sources: sources.update(more=sources["tiny_text"])),
            'source "more" is new',
        ),
        (lambda data: change_sources(data, lambda sources: sources.pop("tiny_vqa")), 'source "tiny_vqa" is missing'),
    ],
    ids=["limit", "more", "less"],
)
def test_a_run_does_not_go_on_with_other_data(
    own_folder: Path, runtime: Runtime, change: Callable[[Path], None], told: str
):
    """In silence the mixture would change, and RUN/sources.json would no longer name what the run has learned from."""
    file = write_tiny_config(own_folder, m6__training__total_steps=2)
    root, data = own_folder / "run", own_folder / "data"
    assert pretrain(load_config(file), root, runtime)
    kept = (root / "sources.json").read_bytes()
    change(data)
    longer = load_config(file, ("m6.training.total_steps=4",))
    with pytest.raises(UserError, match=f"^{data} has changed since {root} learned from it: {told}, .*--restart$"):
        pretrain(longer, root, runtime)
    assert (root / "sources.json").read_bytes() == kept
    before = contents(root)
    assert told in user_error("pretrain", file, "--run-dir", root, "--set", "m6.training.total_steps=4")
    assert contents(root) == before
    assert pretrain(longer, root, runtime, restart=True)
    assert (root / "sources.json").read_bytes() != kept


def test_a_run_goes_on_with_the_same_training_rows(own_folder: Path, runtime: Runtime):
    """Whatever the held-out rows, codes and licences are. An older run has no record to compare with."""
    file = write_tiny_config(own_folder, m6__training__total_steps=2)
    root, data = own_folder / "run", own_folder / "data"
    assert pretrain(load_config(file), root, runtime)
    shutil.rmtree(data)
    with mock.patch.dict(ROWS, validation=ROWS["validation"] + 1):
        build_tiny_data(data)
    build_tiny_codes(data, own_folder / "image_tokenizer")
    change_sources(data, lambda sources: sources["tiny_text"].update(licence="CC0-1.0"))
    assert pretrain(load_config(file, ("m6.training.total_steps=3",)), root, runtime)
    assert json.loads((root / "sources.json").read_text())["sources"]["tiny_text"]["licence"] == "CC0-1.0"
    (root / "sources.json").unlink()
    assert pretrain(load_config(file, ("m6.training.total_steps=4",)), root, runtime)
    assert (root / "sources.json").exists()


def test_damaged_lines_of_the_metrics_are_set_aside(make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]):
    trainer = make_trainer()
    trainer.train(stop_after=2)
    whole = trainer.run.metrics.read_bytes().splitlines(keepends=True)
    damaged = [b"\x00\xff garbage\n", b'{"loss": 1.0}\n', b"[1]\n", b"[" * 100_000 + b"\n"]
    trainer.run.metrics.write_bytes(b"".join([whole[0], *damaged, *whole[1:], b'{"step": 1, "lo']))
    resumed = make_trainer()
    assert resumed.train()
    assert "set aside damaged lines 2, 3, 4, 5" in capfd.readouterr().err
    assert trainer.run.metrics.with_name("metrics.jsonl.damaged").read_bytes() == b"".join(damaged)
    steps = [step for step, _ in losses(trainer.run.root)]
    assert steps == sorted(set(steps))
    assert trainer.run.metrics.read_bytes().startswith(whole[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["weight", "exp_avg", "exp_avg_sq"])
def test_values_that_are_not_finite_are_not_saved(make_trainer: MakeTrainer, value: float, kind: str):
    """An infinite second moment only stops the updates of its weight, so that no later step would show it."""
    trainer = make_trainer(m6__checkpoint__async_save=False)
    trainer.train(stop_after=2)
    [good] = complete_checkpoints(trainer.run.checkpoints)
    assert (trainer.run.root / LAST_CHECKPOINT).read_text() == f"{good.name}\n"
    fragment = next(each for each in trainer.engine.fragments(to_fill=True) if each.kind == kind)
    fragment.data[3] = value
    name = f"{kind if kind != 'weight' else 'weights'} {fragment.name}"
    assert find_nonfinite_state(trainer.engine, trainer.runtime).endswith(f": {name}")
    with pytest.raises(StorageError, match=f"values are not finite: {kind} of {fragment.name}"):
        trainer.checkpointer.save(trainer.engine, 3, {})
    assert complete_checkpoints(trainer.run.checkpoints) == [good]
    assert make_trainer().train()


def test_a_run_that_never_trained_does_not_hold_its_folder(folder: Path, runtime: Runtime, tmp_path: Path):
    root = tmp_path / "run"
    first = parse_config(tiny_document(folder, m6__training__seed=1))
    trained = parse_config(tiny_document(folder, m6__training__seed=2))
    root.mkdir()
    (root / "config.json").write_text(json.dumps(first.document))
    assert pretrain(trained, root, runtime)
    with pytest.raises(UserError, match="already holds another run"):
        RunDirectory(root).check(first)
