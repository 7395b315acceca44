"""fp16: one loss scale for DeepSpeed's parameters and the offloaded experts; it falls, grows, and is saved."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from m6.checkpoints.format import CheckpointReader
from m6.errors import UserError
from m6.training.loop import Trainer
from tests.fixtures.offload_sections import SMALL, assert_equal, experts_of, metrics, state

MakeTrainer = Callable[..., Trainer]

LAYOUTS: dict[str, dict[str, Any]] = {
    "adamw_zero_1": {"zero_optimization": {"stage": 1}, "m6__offload": SMALL},
    "adafactor_zero_2": {
        "zero_optimization": {"stage": 2},
        "m6__offload": {**SMALL, "optimizer": {"type": "Adafactor", "lr": 2e-3}},
    },
    "not_offloaded_zero_2": {"zero_optimization": {"stage": 2}},
}


@pytest.fixture(autouse=True)
def fp16_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported", lambda self: True)


ONE_MICRO_BATCH = {"train_batch_size": 2, "m6__evaluation__interval_steps": 100}


def fp16(power: int = 10, window: int = 1000, **others: Any) -> dict[str, Any]:
    """A run in fp16 whose scale begins at 2^power and doubles after ``window`` steps, of one micro-batch each."""
    section = {"enabled": True, "initial_scale_power": power, "loss_scale_window": window, "hysteresis": 1, **others}
    return {"fp16": section, **ONE_MICRO_BATCH}


def scales(trainer: Trainer) -> list[float]:
    lines = [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]
    return [line["loss_scale"] for line in lines if "loss_scale" in line]


def checkpoint_of(trainer: Trainer, step: int) -> CheckpointReader:
    return CheckpointReader(trainer.run.checkpoints / f"step_{step:08d}")


def with_backward(trainer: Trainer, factors: dict[int, float]) -> None:
    """Multiplies the gradients of some steps (counted from 1), but not the loss, which stays finite."""
    backward = trainer.engine.runner.backward

    def multiplied(loss: torch.Tensor) -> None:
        backward(loss * factors.get(trainer.step + 1, 1.0))

    trainer.engine.runner.backward = multiplied


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_step_after_which_the_scale_grows_is_like_any_other(make_trainer: MakeTrainer, layout: dict[str, Any]):
    """DeepSpeed alone would halve the gradients of its own parameters in that step, and not those of the experts."""
    growing = make_trainer("growing", **layout, **fp16(window=1))
    growing.train(stop_after=3)
    constant = make_trainer("constant", **layout, **fp16())
    constant.train(stop_after=3)
    assert scales(growing) == [1024, 1024, 2048], "the scale of the step, not of the next one"
    assert scales(constant) == [1024, 1024, 1024]
    assert metrics(growing) == metrics(constant)
    ours, theirs = checkpoint_of(growing, 2), checkpoint_of(constant, 2)
    assert ours.state["loss_scaler"]["cur_scale"] == 2048
    for name, kind in theirs.shapes:
        assert torch.equal(ours.read(name, kind), theirs.read(name, kind)), (name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw_zero_1", "not_offloaded_zero_2"])
def test_a_run_goes_on_in_the_middle_of_a_window(make_trainer: MakeTrainer, name: str):
    """To the bit: it stops when half of the hysteresis is used up, and when half of a window is over."""
    changes = {**LAYOUTS[name], **fp16(window=2, hysteresis=2), "m6__training__total_steps": 8}

    def train(folder: str, stop_after: int | None = None) -> Trainer:
        trainer = make_trainer(folder, **changes)
        with_backward(trainer, {2: math.inf, 4: math.inf})
        trainer.train(stop_after)
        return trainer

    whole = train("whole")
    train("parts", 3)
    train("parts", 6)
    resumed = train("parts")
    assert scales(resumed) == scales(whole) == [1024, 1024, 1024, 1024, 512, 512, 512, 1024]
    assert metrics(resumed) == metrics(whole)
    assert_equal(state(resumed), state(whole))


def test_a_scale_that_cannot_fall_ends_the_run(make_trainer: MakeTrainer):
    """With its reason, and not with DeepSpeed's exception; also where the loss itself is finite."""
    changes = {"zero_optimization": {"stage": 2}, "m6__offload": SMALL, "m6__training__max_skipped_steps": 1}
    constant = {"fp16": {"enabled": True, "loss_scale": 8}, **ONE_MICRO_BATCH}
    for name, section, steps in (("dynamic", fp16(power=1, min_loss_scale=1), 3), ("constant", constant, 2)):
        trainer = make_trainer(name, **changes, **section)
        experts = experts_of(trainer)
        experts.runtime.sum_of_squares = lambda: math.inf
        with pytest.raises(UserError, match=rf"step {steps}: loss \d.*, loss scale [18]; 2 steps in a row were not"):
            trainer.train()
        assert (trainer.run.root / "FATAL").exists()
        assert experts.runtime.num_updates == 0
