"""How a checkpoint is written: what host memory holds, who waits for whom, and for how long."""

import errno
import inspect
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import MANIFEST, CheckpointReader, Fragment, write_shards
from m6.errors import StorageError, UserError
from m6.runs.processes import COLLECTIVE_TIMEOUT_S
from m6.training import checkpointing
from m6.training.checkpointing import Checkpointer
from m6.training.loop import Trainer

MakeTrainer = Callable[..., Trainer]


def test_what_is_read_for_a_checkpoint_is_there_one_at_a_time(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
):
    """Offloaded experts are read into new tensors, of which host memory may have no room for all."""
    trainer = make_trainer()
    trainer.train()
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def fresh() -> Iterator[Fragment]:
        for each in fragments():
            each = replace(each, data=each.data.clone())
            made.append(weakref.ref(each.data))
            alive.append(sum(tensor() is not None for tensor in made))
            yield each

    fragments = trainer.engine.fragments
    monkeypatch.setattr(trainer.engine, "fragments", fresh)
    trainer.checkpointer.save(trainer.engine, 99, {})
    trainer.checkpointer.wait()
    assert len(made) > 10
    assert max(alive) <= 2


def test_a_checkpoint_for_which_the_training_waits_copies_one_file_at_a_time(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
):
    """Host memory that is full of experts has no room for a copy of all of them."""
    trainer = make_trainer(m6__checkpoint__async_save=False)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def copy(fragment: Fragment) -> Fragment:
        found = plain(fragment)
        made.append(weakref.ref(found.data))
        alive.append(sum(each().nbytes for each in made if each() is not None))
        return found

    plain = checkpointing._copy_to_host
    monkeypatch.setattr(checkpointing, "_copy_to_host", copy)
    whole = sum(fragment.owned().data.nbytes for fragment in trainer.engine.fragments())
    largest = max(fragment.owned().data.nbytes for fragment in trainer.engine.fragments())
    monkeypatch.setattr(checkpointing, "write_shards", partial(write_shards, shard_bytes=whole // 8))
    trainer.checkpointer.save(trainer.engine, 99, {})
    assert len(made) > 10
    assert max(alive) <= whole // 8 + 2 * largest < whole / 2
    assert CheckpointReader(trainer.run.checkpoints / "step_00000099").verify() == []


def test_a_rank_that_writes_no_record_is_named(make_trainer: MakeTrainer, tmp_path: Path):
    """Rank 0 waits for the others' records; here there is no rank 1 to write one."""
    trainer = make_trainer()
    trainer.runtime = trainer.runtime.__class__(0, 2, 0, trainer.runtime.device)
    checkpointer = Checkpointer(tmp_path / "checkpoints", trainer.runtime, 1, async_save=True, timeout_s=0.2)
    checkpointer.save(trainer.engine, 1, {})
    with pytest.raises(UserError, match=r"rank 1 wrote no record into .*step_00000001 in time"):
        checkpointer.wait()
    assert not (tmp_path / "checkpoints" / "step_00000001" / MANIFEST).exists()
    checkpointer.wait()  # told once


def test_the_time_of_other_ranks_begins_when_rank_0_has_written(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 took longer than the time that it gives, and rank 1 comes after it."""
    trainer = make_trainer()
    trainer.runtime = trainer.runtime.__class__(0, 2, 0, trainer.runtime.device)
    checkpointer = Checkpointer(tmp_path / "checkpoints", trainer.runtime, 1, async_save=True, timeout_s=30.0)
    folder = checkpointer.folder(1)
    clock = SimpleNamespace(
        now=0.0,
        monotonic=lambda: clock.now,
        perf_counter=time.perf_counter,
        sleep=lambda _: write_shards(folder, 1, []),
    )
    monkeypatch.setattr(checkpointing, "time", clock)

    def write(folder: Path, rank: int, pieces: Iterator[Fragment]) -> None:
        write_shards(folder, rank, pieces)
        clock.now += 60.0

    monkeypatch.setattr(checkpointing, "write_shards", write)
    checkpointer.save(trainer.engine, 1, {})
    checkpointer.wait()
    assert CheckpointReader(folder).verify() == []


@pytest.mark.parametrize(("async_save", "waited_s"), [(False, 10.0), (True, 30.0)])
def test_rank_0_gives_up_before_the_ranks_that_wait_for_it(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_save: bool, waited_s: float
):
    """Rank 1 had written 20 s before rank 0, and waits in a collective; rank 2 never writes.

    With a thread the training goes on, and rank 1 waits only when rank 0 does.
    """
    assert inspect.signature(Checkpointer).parameters["timeout_s"].default < COLLECTIVE_TIMEOUT_S
    trainer = make_trainer()
    trainer.runtime = trainer.runtime.__class__(0, 3, 0, trainer.runtime.device)
    checkpointer = Checkpointer(tmp_path / "checkpoints", trainer.runtime, 1, async_save, timeout_s=30.0)
    monkeypatch.setattr("m6.training.checkpointing.raise_together", lambda failure: None)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, perf_counter=time.perf_counter)

    def sleep(_: float) -> None:
        clock.now += 0.5

    clock.sleep = sleep

    def write(folder: Path, rank: int, pieces: Iterator[Fragment]) -> None:
        for number, age in ((0, 0.0), (1, 20.0)):
            write_shards(folder, number, pieces if number == 0 else [])
            os.utime(folder / f"rank_{number:05d}.json", (1e9 - age, 1e9 - age))

    monkeypatch.setattr(checkpointing, "time", clock)
    monkeypatch.setattr(checkpointing, "write_shards", write)
    checkpointer.save(trainer.engine, 1, {})
    if async_save:
        checkpointer._thread.join()  # type: ignore[union-attr]
    assert clock.now == waited_s + 0.5


def test_no_checkpoint_is_written_when_the_attempt_is_over(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The record of a rank that died never comes, and the next attempt takes the folder."""
    trainer = make_trainer()
    trainer.runtime = trainer.runtime.__class__(0, 2, 0, trainer.runtime.device)
    checkpointer = Checkpointer(tmp_path / "checkpoints", trainer.runtime, 1, async_save=True)
    checkpointer.save(trainer.engine, 1, {})
    monkeypatch.setattr("m6.training.checkpointing._GRACE_S", 0.1)
    checkpointer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert not (tmp_path / "checkpoints" / "step_00000001" / MANIFEST).exists()


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize(("timeout_s", "patience_s", "alive"), [(1800.0, 30.0, True), (0.0, 0.2, False)])
def test_a_run_that_waits_for_a_slow_write_shows_that_it_is_alive(
    make_trainer: MakeTrainer,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float,
    patience_s: float,
    alive: bool,
    async_save: bool,
):
    """The watchdog of a job looks at the age of RUN/progress. A write that takes forever is left to it."""
    monkeypatch.setattr("m6.training.checkpointing._ALIVE_S", 0.01)
    trainer = make_trainer()
    progress = trainer.run.root / "progress"
    progress.touch()

    def write(*arguments: object) -> None:
        for _ in range(2):  # once is not enough
            os.utime(progress, (0, 0))
            end = time.monotonic() + patience_s
            while progress.stat().st_mtime == 0 and time.monotonic() < end:
                time.sleep(0.01)

    checkpointer = Checkpointer(trainer.run.checkpoints, trainer.runtime, 1, async_save, timeout_s)
    monkeypatch.setattr(checkpointer, "_write", write)
    checkpointer.save(trainer.engine, 1, {})
    checkpointer.wait()
    assert (progress.stat().st_mtime > 0) == alive


def test_a_run_that_reads_its_checkpoint_shows_that_it_is_alive(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
):
    """Each file and each tensor renews RUN/loading, and the job's watchdog waits."""
    monkeypatch.setattr("m6.runs.directory._LOADING_S", 0.0)
    first = make_trainer()
    loading = first.run.root / "loading"
    first.train(stop_after=1)
    assert not loading.exists()
    again = make_trainer()
    assert loading.exists(), "its files were compared with their checksums"
    loading.unlink()
    again.train(stop_after=2)
    assert loading.exists(), "weights and moments were read"


def test_training_goes_on_while_a_checkpoint_is_written(make_trainer: MakeTrainer, tmp_path: Path):
    """What is written is the state at the call, whatever the weights become meanwhile."""
    trainer = make_trainer()
    before = {(f.name, f.kind): f.data.clone() for f in trainer.engine.fragments() if f.kind == "weight"}
    trainer.checkpointer.save(trainer.engine, 1, {})
    with torch.no_grad():
        for parameter in trainer.engine.module.parameters():
            parameter.fill_(float("nan"))
    trainer.checkpointer.wait()
    reader = CheckpointReader(trainer.run.checkpoints / "step_00000001")
    for (name, kind), value in before.items():
        assert torch.equal(reader.read(name, kind).reshape(-1), value), name


def test_a_checkpoint_that_cannot_be_removed_does_not_end_the_run(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """NFS keeps a shard that a process has open, and with it the folder. The new checkpoint is complete."""
    trainer = make_trainer()
    checkpointer = Checkpointer(trainer.run.checkpoints, trainer.runtime, 1, async_save=True)
    remove = shutil.rmtree

    def fails(folder: Path) -> None:
        if folder == checkpointer.folder(1):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))
        remove(folder)

    monkeypatch.setattr(shutil, "rmtree", fails)
    for step in (1, 2, 3):  # the second leaves what the third finds half-written
        checkpointer.save(trainer.engine, step, {})
        checkpointer.wait()
    warning = f"warning: {checkpointer.folder(1)} cannot be removed: Directory not empty"
    assert capsys.readouterr().err.splitlines().count(warning) == 2
    assert [path.name for path in complete_checkpoints(trainer.run.checkpoints)] == ["step_00000003"]
    with pytest.raises(StorageError, match=r"step_00000001 cannot be written"):
        checkpointer.save(trainer.engine, 1, {})  # old records would look like new ones
