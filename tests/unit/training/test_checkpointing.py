"""Which checkpoints stay, what a damaged one costs, and what a full disk leaves behind."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from m6.checkpoints import format as checkpoint_format
from m6.checkpoints.discovery import check_tokenizer_unchanged, complete_checkpoints, open_newest
from m6.checkpoints.format import MANIFEST, CheckpointReader
from m6.errors import UserError
from m6.training.checkpointing import restore
from m6.training.loop import Trainer
from tests.fixtures.command import contents

MakeTrainer = Callable[..., Trainer]


def names(trainer: Trainer) -> list[str]:
    return sorted(path.name for path in trainer.run.checkpoints.iterdir() if path.is_dir())


def steps(trainer: Trainer) -> list[int]:
    return [json.loads(line)["step"] for line in trainer.run.metrics.read_text().splitlines() if '"loss"' in line]


def train_until(trainer: Trainer, step: int) -> Trainer:
    """Trains as if a person had made RUN/STOP during ``step``."""
    trainer.train(stop_after=step)
    return trainer


def damage(checkpoint: Path) -> Path:
    """Flips a bit of a checkpoint's first shard."""
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [6]), (2, [4, 6]), (9, [2, 4, 6])])
def test_the_last_complete_checkpoints_stay(make_trainer: MakeTrainer, keep_last: int, kept: list[int]):
    trainer = make_trainer(m6__training__total_steps=6, m6__checkpoint__keep_last=keep_last)
    trainer.train()
    assert names(trainer) == [f"step_{step:08d}" for step in kept]
    assert (trainer.run.checkpoints / "latest").read_text() == "step_00000006\n"


def test_incomplete_ones_do_not_count_and_the_newest_complete_one_stays(make_trainer: MakeTrainer):
    trainer = make_trainer(m6__checkpoint__keep_last=1)
    trainer.train()
    root = trainer.run.checkpoints
    (root / "step_00000009").mkdir()
    (root / "corrupt_step_00000001").mkdir()
    assert [path.name for path in complete_checkpoints(root)] == ["step_00000004"]
    trainer.checkpointer.save(trainer.engine, 5, CheckpointReader(root / "step_00000004").state)
    trainer.checkpointer.wait()
    assert names(trainer) == ["corrupt_step_00000001", "step_00000005"]


def test_what_a_killed_attempt_left_is_replaced(make_trainer: MakeTrainer):
    """Its records must not pass for those of the new attempt's ranks."""
    trainer = train_until(make_trainer(), 1)
    stale = trainer.run.checkpoints / "step_00000002"
    stale.mkdir()
    (stale / "rank_00000.json").write_text('{"files": {}, "ranges": []}')
    (stale / "rank_00001.json").write_text('{"files": {}, "ranges": []}')
    (stale / "rank_00000_000.safetensors").write_bytes(b"half")
    make_trainer().train()
    reader = CheckpointReader(stale)
    assert reader.verify() == []
    assert not (stale / "rank_00001.json").exists()
    assert names(trainer) == ["step_00000002", "step_00000004"]


def test_a_step_is_saved_once(make_trainer: MakeTrainer):
    trainer = make_trainer()
    trainer.train()
    before = contents(trainer.run.checkpoints)
    trainer.checkpointer.save(trainer.engine, 4, {})
    trainer.checkpointer.wait()
    assert contents(trainer.run.checkpoints) == before


@pytest.mark.parametrize("harm", ["shard", "manifest"])
def test_a_damaged_one_is_set_aside_and_the_one_before_is_taken(
    make_trainer: MakeTrainer, harm: str, capsys: pytest.CaptureFixture[str]
):
    changes = {"m6__training__total_steps": 8}
    whole = make_trainer("whole", **changes)
    whole.train()
    trainer = train_until(make_trainer(**changes), 6)
    newest = trainer.run.checkpoints / "step_00000006"
    if harm == "shard":
        file = damage(newest)
    else:
        file = newest / MANIFEST
        file.write_text(file.read_text()[:-40])
    capsys.readouterr()
    trainer = make_trainer(**changes)
    trainer.train()
    said = capsys.readouterr().err
    assert f"warning: checkpoint not used: {file}" in said
    assert "at step 4" in said
    # It went on, did steps 5 and 6 again, and ended as if nothing had happened.
    assert names(trainer) == ["corrupt_step_00000006", "step_00000006", "step_00000008"]
    assert steps(trainer) == list(range(1, 9))
    for name, kind in CheckpointReader(whole.run.checkpoints / "step_00000008").shapes:
        ours, theirs = (
            CheckpointReader(side.run.checkpoints / "step_00000008").read(name, kind) for side in (trainer, whole)
        )
        assert torch.equal(ours, theirs), (name, kind)


def test_a_checkpoint_that_is_gone_is_told(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]):
    """Without its manifest it looks like one that a killed attempt began, and no file of it says what is lost."""
    changes = {"m6__training__total_steps": 6, "m6__checkpoint__interval_steps": 2}
    trainer = train_until(make_trainer(**changes), 4)
    make_trainer(**changes)._resume()
    assert "warning" not in capsys.readouterr().err
    (trainer.run.checkpoints / "step_00000004" / MANIFEST).unlink()
    make_trainer(**changes)._resume()
    lost = f"{trainer.run.root} was saved as step_00000004, but {trainer.run.checkpoints} holds no such checkpoint"
    assert f"warning: {lost}; it goes on from step 2\n" in capsys.readouterr().err
    damaged = trainer.run.root / "last_checkpoint"
    for content in (b"", b"step_\x00\x1b[1m", b"step_00000004_old\n", b"\xff" * 4096):
        damaged.write_bytes(content)
        make_trainer(**changes)._resume()
        said = capsys.readouterr().err
        found = repr(content.decode("utf-8", "backslashreplace").strip())[:80]
        assert f"warning: {damaged}: corrupt: it holds {found}, expected a name such as step_00000002; " in said
        assert f"goes on from {trainer.run.checkpoints / 'step_00000002'}, the newest checkpoint, and" in said


def test_tensorboard_shows_a_repeated_step_once(make_trainer: MakeTrainer):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"m6__logging__tensorboard": True, "m6__training__total_steps": 5}
    trainer = train_until(make_trainer(**changes), 4)
    damage(trainer.run.checkpoints / "step_00000004")
    resumed = make_trainer(**changes)
    resumed.train()
    for each in (trainer, resumed):
        each.trackers.close()
    events = EventAccumulator(str(trainer.run.root / "tensorboard")).Reload()
    assert [point.step for point in events.Scalars("loss")] == [1, 2, 3, 4, 5]


def test_steps_of_nine_digits_come_last(tmp_path: Path):
    for name in ("step_100000000", "step_99999999"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_99999999", "step_100000000"]


def test_damage_that_comes_back_keeps_every_copy(make_trainer: MakeTrainer):
    for number in range(4):
        trainer = make_trainer()
        trainer.train()
        damage(trainer.run.checkpoints / "step_00000004")
        if number == 2:  # as a person may
            aside = trainer.run.checkpoints / "corrupt_step_00000004"
            aside.rename(aside.with_suffix(".old"))
    assert names(trainer) == [
        "corrupt_step_00000004.old",
        "corrupt_step_00000004_1",
        "corrupt_step_00000004_2",
        "step_00000002",
        "step_00000004",
    ]


def test_with_nothing_whole_the_run_begins_anew_only_if_asked_to(make_trainer: MakeTrainer):
    trainer = make_trainer()
    trainer.train()
    for folder in complete_checkpoints(trainer.run.checkpoints):
        damage(folder)
    with pytest.raises(UserError, match=r"was saved as step_00000004, .*step_00000004.*; .*step_00000002.*--restart"):
        make_trainer()
    trainer.run.restart()
    trainer = make_trainer()
    trainer.train()
    assert steps(trainer) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"m6__model__ffn_hidden_size": 96}, r"weight of .*ffn.* has shape \(.*64.*\), this model has \(.*96.*\)"),
        ({"m6__model__num_layers": 1}, r"holds .*layers\.1\..*, which this model does not have"),
        ({"m6__model__num_layers": 3}, r"holds no weight of .*layers\.2\."),
        ({"m6__moe__num_experts": 8}, r"router.weight has shape \(4, 32\), this model has \(8, 32\)"),
        ({"optimizer": {"type": "Adafactor", "params": {"lr": 1e-3}}}, r"holds no row_var of .*embeddings"),
    ],
)  # fmt: skip
def test_the_checkpoint_of_another_model(make_trainer: MakeTrainer, change: dict, expected: str):
    trainer = make_trainer()
    trainer.train()
    other = make_trainer("other", **change)
    with pytest.raises(UserError, match=expected) as caught:
        restore(other.engine, CheckpointReader(trainer.run.checkpoints / "step_00000004"))
    assert "step_00000004" in str(caught.value)
    assert "belongs to another model" in str(caught.value)
    assert complete_checkpoints(trainer.run.checkpoints), "another model's checkpoint is not damaged"


def test_a_tokenizer_that_changed_is_told_from_the_newest_checkpoint(make_trainer: MakeTrainer):
    trainer = make_trainer()
    root = trainer.run.checkpoints
    check_tokenizer_unchanged(root, "anything")  # nothing to compare with
    trainer.train()
    check_tokenizer_unchanged(root, trainer.data.tokenizer.fingerprint)
    with pytest.raises(UserError, match=r"fingerprint 0000abcd instead of \w{12}"):
        check_tokenizer_unchanged(root, "0000abcd")
    (root / "step_00000004" / MANIFEST).write_text("{")
    check_tokenizer_unchanged(root, "0000abcd")  # resume sets it aside first


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Makes the kernel refuse to write files beyond a size, as a full disk refuses to write at all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("async_save", [True, False])
def test_a_shard_that_cannot_be_written_leaves_the_one_before(
    make_trainer: MakeTrainer, file_size_limit: Callable[[int], None], async_save: bool
):
    changes = {"m6__checkpoint__async_save": async_save, "m6__training__total_steps": 6}
    trainer = train_until(make_trainer(**changes), 3)
    before = contents(trainer.run.checkpoints / "step_00000002")
    trainer = make_trainer(**changes)
    file_size_limit(100_000)
    with pytest.raises(UserError, match=f"{trainer.run.checkpoints}: a checkpoint could not be written"):
        trainer.train()
    file_size_limit(resource.RLIM_INFINITY)
    assert [path.name for path in complete_checkpoints(trainer.run.checkpoints)] == ["step_00000002", "step_00000003"]
    assert contents(trainer.run.checkpoints / "step_00000002") == before
    assert not list((trainer.run.checkpoints / "step_00000004").glob("*.tmp"))
    make_trainer(**changes).train()  # there is space again
    assert names(trainer) == ["step_00000004", "step_00000006"]
    assert steps(trainer) == list(range(1, 7))


@pytest.mark.parametrize("place", ["save_file", "write_json"])
def test_a_full_disk_is_told_with_its_reason(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, place: str):
    def fail(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_format, place, fail)
    trainer = make_trainer()
    with pytest.raises(UserError, match=f"{trainer.run.checkpoints}.*No space left on device"):
        trainer.train()
    assert complete_checkpoints(trainer.run.checkpoints) == []


def test_a_checkpoint_can_be_moved_to_another_run(make_trainer: MakeTrainer):
    """Its files name no folder."""
    trainer = make_trainer()
    trainer.train()
    other = make_trainer("other")
    shutil.copytree(trainer.run.checkpoints, other.run.checkpoints)
    reader, problems = open_newest(other.run.checkpoints)
    assert problems == []
    assert reader is not None
    restore(other.engine, reader)
    assert (reader.state["step"], reader.state["samples_seen"], other.engine._deepspeed.global_steps) == (4, 32, 4)
    for ours, theirs in zip(other.engine.fragments(), trainer.engine.fragments(), strict=True):
        assert torch.equal(ours.data, theirs.data), (ours.name, ours.kind)
