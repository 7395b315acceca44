"""``m6 delink``: what it writes, how little memory it takes, and what it refuses."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.checkpoints.delink import DelinkedReader, delink_run
from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from m6.errors import UserError
from m6.training.loop import Trainer
from m6.training.sizes import new_storages
from tests.fixtures.command import contents, m6

MakeTrainer = Callable[..., Trainer]
LAYERS = 4


def pseudo_run(make_trainer: MakeTrainer, **changes: Any) -> Trainer:
    """A run that was stopped in its Pseudo stage, after one step."""
    settings = {"m6__model__num_layers": LAYERS, "m6__pseudo_to_real": {"switch_step": 3}, **changes}
    trainer = make_trainer(**settings)
    trainer.train(stop_after=1)
    return trainer


def newest(root: Path) -> Path:
    return complete_checkpoints(root / "checkpoints")[-1]


@pytest.mark.parametrize("optimizer_state", ["copy", "reset"])
def test_the_real_run_holds_what_the_switch_would_have_made(
    make_trainer: MakeTrainer, tmp_path: Path, optimizer_state: str
):
    settings = {"m6__pseudo_to_real": {"switch_step": 3, "optimizer_state": optimizer_state}}
    trainer = pseudo_run(make_trainer, **settings)
    before = contents(trainer.run.root)
    out = delink_run(trainer.run.root, tmp_path / "real", trainer.runtime)
    assert contents(trainer.run.root) == before
    written, expected = CheckpointReader(newest(out)), DelinkedReader(newest(trainer.run.root), optimizer_state)
    assert written.verify() == []
    assert written.shapes == expected.shapes
    assert written.state == expected.state
    assert (written.state["step"], written.state["optimizer_step"]) == (1, 1 if optimizer_state == "copy" else 0)
    for name, kind in written.shapes:
        value = written.read(name, kind)
        assert torch.equal(value, expected.read(name, kind)), (name, kind)
        if optimizer_state == "reset" and kind != "weight":
            assert not value.any()
    assert json.loads((out / "config.json").read_text()) == trainer.config.document
    assert (out / "metrics.jsonl").read_text() == trainer.run.metrics.read_text()
    real = make_trainer("real", **{"m6__model__num_layers": LAYERS, **settings})
    assert not real.stage.is_pseudo
    assert real.train() is True


def test_the_real_run_does_not_begin_anew_without_its_checkpoint(make_trainer: MakeTrainer, tmp_path: Path):
    trainer = pseudo_run(make_trainer)
    out = delink_run(trainer.run.root, tmp_path / "real", trainer.runtime)
    shutil.rmtree(out / "checkpoints")
    with pytest.raises(UserError, match=r"was saved as step_00000001, but .* holds no whole checkpoint"):
        make_trainer("real", m6__model__num_layers=LAYERS, m6__pseudo_to_real={"switch_step": 3})


def test_it_holds_less_than_two_layers(make_trainer: MakeTrainer, tmp_path: Path):
    wide = {"m6__model__hidden_size": 128, "m6__model__ffn_hidden_size": 512}
    trainer = pseudo_run(make_trainer, **wide)
    reader = CheckpointReader(newest(trainer.run.root))
    layer = sum(4 * torch.Size(shape).numel() for (name, _), shape in reader.shapes.items() if ".layers." in name)
    assert layer > 5 << 20
    tracemalloc.start()
    try:
        with new_storages() as storages:
            delink_run(trainer.run.root, tmp_path / "real", trainer.runtime)
        python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The sum is a bound: tensors, and what Python holds (the serializer's bytes, the manifest).
    assert storages.take_peak() + python < 2 * layer
    real = CheckpointReader(newest(tmp_path / "real"))
    assert sum(4 * torch.Size(shape).numel() for shape in real.shapes.values()) > LAYERS * layer


def test_a_pseudo_run_is_exported_as_the_real_model(make_trainer: MakeTrainer, tmp_path: Path):
    from m6.checkpoints.loading import load_run_model

    trainer = pseudo_run(make_trainer)
    model, _ = load_run_model(trainer.run.root, torch.device("cpu"))
    batch = trainer.data.micro_batch(0)
    trainer.engine.module.eval()
    with torch.no_grad():
        ours, theirs = (m(**batch.model_inputs()).logits for m in (model, trainer.engine.module))
    assert torch.equal(ours, theirs)


def test_what_cannot_be_delinked_is_told_and_left_alone(make_trainer: MakeTrainer, tmp_path: Path):
    trainer = pseudo_run(make_trainer)
    root, out = trainer.run.root, tmp_path / "out"

    def refuse(expected: str, run: Path = root) -> None:
        before = contents(run)
        with pytest.raises(UserError, match=expected):
            delink_run(run, out, trainer.runtime)
        assert contents(run) == before
        assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == left

    left: list[str] = []
    refuse("nowhere/config.json: no such file", tmp_path / "nowhere")
    shard = sorted(newest(root).glob("*.safetensors"))[0]
    shutil.move(shard, tmp_path / "shard")
    refuse(f"{shard}: missing")
    shutil.copy(tmp_path / "shard", shard)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    refuse(f"{shard}: corrupt")
    shutil.move(tmp_path / "shard", shard)

    out.mkdir()
    (out / "mine").write_text("kept")
    left = ["out"]
    refuse("out exists and is not an empty folder; choose another --out")
    shutil.rmtree(out)
    left = []

    delink_run(root, tmp_path / "real", trainer.runtime)
    refuse("real is already Real: delinked after 1 steps", tmp_path / "real")
    plain = make_trainer("plain")
    plain.train()
    refuse("has no m6.pseudo_to_real: its layers share no weights", plain.run.root)
    shutil.rmtree(root / "checkpoints")
    refuse("checkpoints holds no complete checkpoint")


def test_a_failure_while_writing_leaves_nothing(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = pseudo_run(make_trainer)
    monkeypatch.setattr("m6.checkpoints.delink.write_manifest", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match="out was not written: disk full"):
        delink_run(trainer.run.root, tmp_path / "out", trainer.runtime)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_the_command(make_trainer: MakeTrainer, tmp_path: Path):
    trainer = pseudo_run(make_trainer)
    outcome = m6("delink", trainer.run.root, "--out", tmp_path / "real")
    assert (outcome.code, outcome.stdout) == (0, f"{tmp_path / 'real'}\n"), outcome
