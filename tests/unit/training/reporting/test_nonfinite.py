"""A loss that is not finite: the step is skipped, and after too many in a row the run ends with the evidence."""

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from m6.data.collate import MicroBatch
from m6.errors import UserError
from m6.training.loop import Trainer
from m6.training.reporting.outcome import StepOutcome

STAGES = [0, 1, 2, 3]


def poison(trainer: Trainer, steps: set[int], value: float = float("nan")) -> list[list[torch.Tensor]]:
    """Makes the loss of some steps (counted from 1) not finite; returns the weights and moments after each step."""
    run_step, backward, states = trainer.run_step, trainer.engine.backward, []

    def poisoned_backward(loss: torch.Tensor) -> None:
        backward(loss * value if trainer.step + 1 in steps else loss)

    def recorded_step(micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        [outcome] = run_step(micro_batches)
        states.append([fragment.data.clone() for fragment in trainer.engine.fragments()])
        return [outcome]

    trainer.engine.backward = poisoned_backward
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
