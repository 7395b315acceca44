"""A loss that is not finite: the step is skipped, and after too many in a row the run ends with the evidence."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from m6.checkpoints.discovery import complete_checkpoints
from m6.config.run import parse_config
from m6.data.collate import MicroBatch
from m6.errors import UserError
from m6.training.engine import async_pipeline
from m6.training.engine.async_pipeline import AsyncPipelineRunner
from m6.training.loop import Trainer, pretrain
from m6.training.reporting.sums import StepOutcome
from tests.fixtures.tiny_run import tiny_document

STAGES = [0, 1, 2, 3]


def poison(trainer: Trainer, steps: set[int], value: float = float("nan")) -> list[list[torch.Tensor]]:
    """Makes the loss of some steps (counted from 1) not finite; returns the weights and moments after each step."""
    run_step, backward, states = trainer.run_step, trainer.engine.runner.backward, []

    def poisoned_backward(loss: torch.Tensor) -> None:
        backward(loss * value if trainer.step + 1 in steps else loss)

    def recorded_step(micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        [outcome] = run_step(micro_batches)
        states.append([fragment.data.clone() for fragment in trainer.engine.fragments()])
        return [outcome]

    trainer.engine.runner.backward = poisoned_backward
    trainer.run_step = recorded_step
    return states


def lines(trainer: Trainer) -> list[dict]:
    entries = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_is_skipped_and_training_goes_on(make_trainer: Callable[..., Trainer], stage: int, value: float):
    trainer = make_trainer(zero_optimization={"stage": stage})
    states = poison(trainer, {2}, value)
    trainer.train()
    first, second, third, fourth = states
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "weights and moments are as before"
    for earlier, later in ((second, third), (third, fourth)):
        assert not any(torch.equal(a, b) for a, b in zip(earlier, later, strict=True) if len(a) > 1)
        assert all(value.isfinite().all() for value in later)
    assert [line["skipped_steps"] for line in lines(trainer)] == [0, 1, 0, 0]
    assert lines(trainer)[1]["grad_norm"] is None  # JSON has no number for it
    assert not (trainer.run.root / "FATAL").exists()


def test_every_stage_goes_on_in_the_same_way(make_trainer: Callable[..., Trainer]):
    losses = []
    for stage in STAGES:
        trainer = make_trainer(f"stage_{stage}", zero_optimization={"stage": stage})
        poison(trainer, {2})
        trainer.train()
        losses.append([line["loss"] for line in lines(trainer)])
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("stage", [0, 2])
def test_too_many_in_a_row_end_the_run_with_the_batch(make_trainer: Callable[..., Trainer], stage: int):
    trainer = make_trainer(zero_optimization={"stage": stage}, m6__training__max_skipped_steps=1)
    states = poison(trainer, {2, 3})
    batches = []
    next_batches = trainer._batches
    trainer._batches = lambda: (batches.append(batch) or batch for batch in next_batches())
    with pytest.raises(UserError, match=r"step 3: .* 2 steps in a row were not finite .*max_skipped_steps 1"):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[2], strict=True))
    assert (trainer.run.root / "FATAL").read_text().startswith("step 3: loss ")
    assert not (trainer.run.root / "DONE").exists()
    files = sorted((trainer.run.root / "nonfinite").iterdir())
    assert [file.name for file in files] == [f"step_00000003_rank_00000_{n:03d}.safetensors" for n in range(4)]
    for file, batch in zip(files, batches[2], strict=True):
        saved = load_file(file)
        assert saved.keys() == batch.tensors().keys()
        assert all(torch.equal(saved[name], value) for name, value in batch.tensors().items())
    with pytest.raises(UserError, match="ended as FATAL: step 3"):
        make_trainer(zero_optimization={"stage": stage}, m6__training__max_skipped_steps=1)


def test_none_may_be_skipped(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(m6__training__max_skipped_steps=0)
    poison(trainer, {1})
    with pytest.raises(UserError, match=r"step 1: .*1 steps in a row"):
        trainer.train()


def test_only_steps_in_a_row_count(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer(m6__training__max_skipped_steps=1, m6__training__total_steps=6)
    poison(trainer, {1, 3, 5})
    trainer.train()
    assert sum(line["skipped_steps"] for line in lines(trainer)) == 3
    assert (trainer.run.root / "DONE").exists()


def test_what_is_not_finite_is_attributed_to_rank_and_tensor(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
):
    """Weights and losses at once, and gradients from the step after, where each of them is looked at."""
    trainer = make_trainer(m6__training__max_skipped_steps=1)
    name = "model.layers.0.attention.qkv.weight"
    run_step, weight = trainer.run_step, trainer.engine.module.get_parameter(name)

    def poisoned_step(micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        if trainer.step == 2:
            weight.data.view(-1)[5] = float("nan")
        return run_step(micro_batches)

    trainer.run_step = poisoned_step
    place = f"not finite on {trainer.runtime.name_of(0)}: weights {name} and loss of "
    with pytest.raises(UserError, match=rf"step 4: .*{place}[\w, ]+ and gradients model\.\S+ and \d+ more; "):
        trainer.train()
    assert f"warning: step 3 is skipped: {place}" in capsys.readouterr().err
    assert [path.name for path in complete_checkpoints(trainer.run.checkpoints)] == ["step_00000002"]


def test_a_weight_that_is_not_finite_is_not_saved(make_trainer: Callable[..., Trainer]):
    """Not even by a person's wish: with keep_last 1 the last good checkpoint would go for it."""
    trainer = make_trainer(m6__checkpoint__keep_last=1)
    run_step = trainer.run_step

    def poisoned_step(micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        outcomes = run_step(micro_batches)
        if trainer.step == 2:
            trainer.engine.module.get_parameter("model.layers.1.attention.qkv.weight").data[0] = float("inf")
            (trainer.run.root / "SAVE").touch()
        return outcomes

    trainer.run_step = poisoned_step
    with pytest.raises(UserError, match=r"not finite on .*: weights model.layers.1.attention.qkv.weight"):
        trainer.train()
    assert [path.name for path in complete_checkpoints(trainer.run.checkpoints)] == ["step_00000002"]


def test_a_weight_that_was_not_finite_once_costs_a_restart(make_trainer: Callable[..., Trainer], folder: Path):
    """The run comes to the numbers of one that was left alone; with one checkpoint that is kept."""
    whole, trainer = make_trainer("whole"), make_trainer(m6__checkpoint__keep_last=1)
    whole.train()
    run_step, left = Trainer.run_step, [1]

    def poisoned_step(self: Trainer, micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        outcomes = run_step(self, micro_batches)
        if self.step == 3 and left and left.pop():
            self.engine.module.get_parameter("model.layers.1.attention.qkv.weight").data[0] = float("inf")
        return outcomes

    config = parse_config(tiny_document(folder, m6__checkpoint__keep_last=1))
    with mock.patch.object(Trainer, "run_step", poisoned_step):
        assert pretrain(config, trainer.run.root, trainer.runtime)
    assert not left
    assert json.loads((trainer.run.root / "fault.json").read_text())["begins_at"] == 2
    assert [line["loss"] for line in lines(trainer)] == [line["loss"] for line in lines(whole)]


def test_contexts_end_with_an_error(make_trainer: Callable[..., Trainer]):
    """Each of them undoes what it did."""
    delayed = make_trainer(m6__gradient_delay={"accept_loss": True}, zero_optimization={"stage": 1})
    optimizer = delayed.engine._updater.delayed._optimizer
    with pytest.raises(KeyError), delayed.engine._updater.delayed.exchanging():
        raise KeyError
    assert "step" not in vars(optimizer)
    delayed.engine._deepspeed.train()
    with pytest.raises(KeyError), delayed.engine.evaluating():
        raise KeyError
    assert delayed.engine.module.training
    weights = {parameter: torch.zeros_like(parameter) for parameter in delayed.engine.module.parameters()}
    before = [parameter.data_ptr() for parameter in weights]
    with pytest.raises(KeyError), async_pipeline._in_parameters(weights):
        raise KeyError
    assert [parameter.data_ptr() for parameter in weights] == before
    for parameter in weights:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(KeyError), AsyncPipelineRunner._set_aside(SimpleNamespace(_trained=list(weights))):
        raise KeyError
    assert all(parameter.grad is not None for parameter in weights)
