"""Sharing and delinking: what must be equal to the bit, and what must add up; kills in the switch."""

import json
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from m6.checkpoints.delink import DelinkedReader
from m6.checkpoints.format import WEIGHT, CheckpointReader
from m6.errors import UserError
from m6.model.parameters import num_parameters
from m6.planning.prediction import predict_memory
from m6.training import checkpointing as checkpoint
from m6.training import loop
from m6.training.checkpointing import restore
from m6.training.deepspeed_private import base_optimizer
from m6.training.engine.build import build_engine
from m6.training.loop import Trainer
from m6.training.sizes import BatchShape
from m6.training.stages.stage import Stage

MakeTrainer = Callable[..., Trainer]
LAYERS = 4
MODEL = {"m6__model__num_layers": LAYERS}
DENSE = {"m6__moe": None}
CHECKPOINTED = {"m6__training__activation_checkpointing": True}


def changes(switch_step: int = 2, **settings: Any) -> dict[str, Any]:
    return {**MODEL, "m6__pseudo_to_real": {"switch_step": switch_step, **settings}}


def entries(trainer: Trainer) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def gradients(trainer: Trainer, engine: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, loss and gradients of one micro-batch, without dropout."""
    engine.module.eval()
    batch = trainer.data.micro_batch(0)
    output = engine.module(**batch.model_inputs(), labels=batch.labels)
    output.loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in engine.module.named_parameters()}
    engine.module.zero_grad()
    return output.logits.detach(), output.loss.detach(), found


def both_engines(trainer: Trainer) -> tuple[Any, Any]:
    """The Pseudo engine of a run and the Real one, by way of a checkpoint of the former."""
    trainer.train(stop_after=1)
    reader = DelinkedReader(trainer.run.checkpoints / "step_00000001")
    real = build_engine(trainer.config, trainer.runtime)
    restore(real, reader)
    return trainer.engine, real


@pytest.mark.parametrize("model", [{}, DENSE, CHECKPOINTED], ids=["moe", "dense", "checkpointed"])
@pytest.mark.parametrize("gradient", ["sum", "mean"])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_delinking_changes_no_bit_and_splits_the_gradient(
    make_trainer: MakeTrainer, model: dict[str, Any], gradient: str, num_groups: int
):
    trainer = make_trainer(**changes(gradient=gradient, num_groups=num_groups), **model)
    pseudo, real = both_engines(trainer)
    pseudo_logits, pseudo_loss, pseudo_gradients = gradients(trainer, pseudo)
    logits, loss, real_gradients = gradients(trainer, real)
    assert torch.equal(pseudo_logits, logits)
    assert torch.equal(pseudo_loss, loss)
    sharing = trainer.stage.planned_sharing
    assert sharing is not None
    shared = 0
    for name, found in pseudo_gradients.items():
        names = sharing.real_names(name)
        assert len(names) in (1, LAYERS // num_groups)
        shared += len(names) > 1
        total = torch.stack([real_gradients.pop(real).double() for real in names]).sum(0)
        expected = total / len(names) if gradient == "mean" else total
        # Autograd adds the layers up in fp32: some units in the last place of the largest.
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert shared
    assert not real_gradients


@pytest.mark.parametrize("optimizer", ["AdamW", "Adafactor"])
def test_copied_state_keeps_the_layers_equal_under_equal_gradients(make_trainer: MakeTrainer, optimizer: str):
    trainer = make_trainer(**changes(), optimizer={"type": optimizer, "params": {"lr": 1e-3}})
    _, real = both_engines(trainer)
    before = {name: parameter.detach().clone() for name, parameter in real.module.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    sharing = trainer.stage.planned_sharing
    assert sharing is not None
    same: dict[str, Tensor] = {}
    for name, parameter in real.module.named_parameters():
        first_layer_name = sharing.real_names(name)[0]
        parameter.grad = same.setdefault(first_layer_name, torch.randn(parameter.shape, generator=generator)).clone()
    base_optimizer(real._deepspeed).step()
    after = dict(real.module.named_parameters())
    for name, parameter in after.items():
        assert torch.equal(parameter, after[sharing.real_names(name)[0]]), name
        assert not torch.equal(parameter, before[name]), name


def test_reset_state_is_that_of_a_new_optimizer(make_trainer: MakeTrainer):
    trainer = make_trainer(**changes(optimizer_state="reset"))
    both_engines(trainer)
    real = build_engine(trainer.config, trainer.runtime)
    restore(real, DelinkedReader(trainer.run.checkpoints / "step_00000001", "reset"))
    assert real.optimizer_step == 0
    moments = [fragment.data for fragment in real.fragments() if fragment.kind != WEIGHT]
    assert moments
    assert not any(moment.any() for moment in moments)
    trainer.train_step.engine = real
    trainer = make_trainer(**changes(optimizer_state="reset"))
    trainer.train()
    assert trainer.engine.optimizer_step == trainer.settings.training.total_steps - 2


@pytest.mark.parametrize("model", [{}, DENSE], ids=["moe", "dense"])
def test_parameters_are_those_of_one_layer_then_of_all(make_trainer: MakeTrainer, model: dict[str, Any]):
    trainer = make_trainer(**changes(), **model)
    sharing, config = trainer.stage.sharing, trainer.config.model
    held = sum(parameter.numel() for parameter in trainer.engine.module.parameters())
    counts, real = num_parameters(config, sharing), num_parameters(config)
    assert held == counts["total"]
    outside = ("embeddings", "patch_encoder")
    final_norm = 2 * config.hidden_size
    layer = (real["total"] - sum(real[part] for part in outside) - final_norm) // LAYERS
    assert held == sum(real[part] for part in outside) + final_norm + layer
    trainer.train()
    assert sum(parameter.numel() for parameter in trainer.engine.module.parameters()) == real["total"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_stages_hold_the_predicted_bytes(make_trainer: MakeTrainer, stage: int):
    any_batch = BatchShape(samples=1, rows=1, sequence_length=64, real=64, targets=1, pictures=0)
    trainer = make_trainer(**changes(), zero_optimization__stage=stage)
    seen = []
    release = trainer._delink

    def look() -> None:
        seen.append((trainer.stage.sharing, trainer.engine.state_bytes()))
        release()

    with mock.patch.object(trainer, "_delink", look):
        trainer.train()
    seen.append((None, trainer.engine.state_bytes()))
    assert seen[0][0] is not None
    for sharing, held in seen:
        predicted = predict_memory(trainer.config, 1, any_batch, sharing)
        assert held == {"weights": predicted.weights, "optimizer_state": predicted.optimizer_state}
    # Where blocks are most of the model this nears the number of layers; here embeddings are a good part.
    assert sum(seen[1][1].values()) > 1.5 * sum(seen[0][1].values())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_pseudo_memory_is_free_before_the_real_engine_comes(make_trainer: MakeTrainer, stage: int):
    trainer = make_trainer(**changes(), zero_optimization__stage=stage)
    held: list[weakref.ref] = []
    left = []
    delink = trainer._delink

    def look() -> None:
        tensors: list[Tensor] = []
        for parameter in trainer.engine.module.parameters():
            tensors += [parameter.data, getattr(parameter, "ds_tensor", parameter.data)]
        for parameter, state in base_optimizer(trainer.engine._deepspeed).state.items():
            tensors += [parameter.data, *(value for value in state.values() if torch.is_tensor(value))]
        held.extend(weakref.ref(tensor.untyped_storage()) for tensor in tensors if tensor.numel() > 1)

    def look_and_delink() -> None:
        look()
        delink()

    def build(*arguments: Any) -> Any:
        left.append(sum(reference() is not None for reference in held))
        return build_engine(*arguments)

    with mock.patch.object(loop, "build_engine", build), mock.patch.object(trainer, "_delink", look_and_delink):
        trainer.train()
    assert len(held) > 20
    assert left == [0]


class Killed(Exception):
    """Ends an attempt where kill -9 would; in a thread that saves it becomes a UserError."""


def killed_at(owner: Any, name: str, call: int = 1, after: bool = False) -> Any:
    """Patches a function to die in its ``call``-th call, before or after it has worked."""
    original, calls = getattr(owner, name), 0

    def function(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = original(*arguments, **keywords)
        if calls == call:
            raise Killed
        return result

    return mock.patch.object(owner, name, function)


# With switch_step 2 and a checkpoint every 2 steps: where an attempt dies, and the step that the next one begins at.
KILLS: dict[str, tuple[tuple[Any, ...], int]] = {
    "while the Pseudo shards are written": ((checkpoint, "write_shards"), 0),
    "before the Pseudo manifest": ((checkpoint, "write_manifest"), 0),
    "after the Pseudo manifest": ((checkpoint, "write_manifest", 1, True), 2),
    "before the Real engine": ((loop, "build_engine", 2), 2),
    "after the Real engine": ((loop, "build_engine", 2, True), 2),
    "after the weights came over": ((loop, "restore", 1, True), 2),
    "in the first Real step": ((Stage, "learning_rate_factor", 3), 2),
    "before the Real manifest": ((checkpoint, "write_manifest", 2), 2),
    "after the Real manifest": ((checkpoint, "write_manifest", 2, True), 4),
}


KILLED = {
    **changes(2, correlation_interval_steps=3, learning_rate="rewarm", rewarm_steps=3),
    "m6__training__total_steps": 6,
    "m6__checkpoint__async_save": False,
    "m6__checkpoint__keep_last": 9,
}


@pytest.fixture(scope="module")
def whole(open_trainer: Callable[..., Trainer], tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The trainer of a run that nobody killed."""
    trainer = open_trainer(tmp_path_factory.mktemp("whole") / "run", **KILLED)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("where", KILLS)
def test_a_job_killed_in_the_switch_ends_equal_to_the_bit(
    make_trainer: MakeTrainer, whole: Trainer, where: str, capsys: pytest.CaptureFixture[str]
):
    place, begin = KILLS[where]
    with killed_at(*place), pytest.raises((Killed, UserError)):
        make_trainer(**KILLED).train()
    capsys.readouterr()
    trainer = make_trainer(**KILLED)
    trainer.train()
    said = capsys.readouterr().err
    assert (f"at step {begin}\n" in said) == (begin > 0), said
    untimed = ("step", "loss", "aux_loss", "objectives", "learning_rate", "grad_norm", "tokens_seen", "experts")
    for ours, theirs in zip(entries(trainer), entries(whole), strict=True):
        assert [ours[key] for key in untimed] == [theirs[key] for key in untimed]
        ours_stage, theirs_stage = ours["stage"], theirs["stage"]
        ours_stage.pop("delink_s", None)
        theirs_stage.pop("delink_s", None)
        assert ours_stage == theirs_stage
    for step in (2, 4, 6):
        a, b = (CheckpointReader(side.run.checkpoints / f"step_{step:08d}") for side in (trainer, whole))
        assert a.shapes == b.shapes
        assert all(torch.equal(a.read(*key), b.read(*key)) for key in a.shapes)


def test_a_checkpoint_knows_its_stage(make_trainer: MakeTrainer):
    trainer = make_trainer(**changes(2), m6__training__total_steps=4)
    trainer.train()
    first, last = (CheckpointReader(trainer.run.checkpoints / f"step_{step:08d}") for step in (2, 4))
    assert first.state["pseudo_to_real"]["stage"] == "pseudo"
    assert last.state["pseudo_to_real"]["stage"] == "real"
    assert first.state["pseudo_to_real"]["switch_step"] == last.state["pseudo_to_real"]["switch_step"] == 2
    layers = {name.split("layers.")[1].split(".")[0] for name in first.names("weight") if "layers." in name}
    assert layers == {"0"}, "a shared tensor is stored once"
    assert len({name for name in last.names("weight") if name.endswith("attention.qkv.weight")}) == LAYERS


def test_a_stop_in_the_step_of_the_switch_is_obeyed(make_trainer: MakeTrainer):
    trainer = make_trainer(**changes(2))
    assert trainer.train(stop_after=2) is False
    assert trainer.stage.is_pseudo
    trainer = make_trainer(**changes(2))
    assert not trainer.stage.is_pseudo
    trainer.train()
    assert [entry["stage"]["name"] for entry in entries(trainer)] == ["pseudo", "pseudo", "real", "real"]


def test_the_rate_is_warmed_up_again(make_trainer: MakeTrainer):
    settings = {"m6__training__total_steps": 8, "m6__schedule__decay": "constant", "m6__schedule__warmup_steps": 0}
    trainer = make_trainer(**changes(2, learning_rate="rewarm", rewarm_steps=4), **settings)
    trainer.train()
    rates = [entry["learning_rate"] / 1e-3 for entry in entries(trainer)]
    assert rates == pytest.approx([1, 1, 0.25, 0.5, 0.75, 1, 1, 1])
