"""A trainer announces the forecast that it is given, and predicts nothing by itself."""

from collections.abc import Callable

import pytest

from m6.architecture.sharing import Sharing
from m6.training.loop import Trainer
from m6.training.sizes import BatchShape

MakeTrainer = Callable[..., Trainer]


class Words:
    """A forecast of words."""

    def memory(self, batch: BatchShape, sharing: Sharing | None) -> str:
        return f"memory of {batch.samples} samples, {'Real' if sharing is None else 'Pseudo'}"

    def step(self, batch: BatchShape) -> str:
        return f"a step of {batch.samples} samples"

    def outcome(self) -> str:
        return "as expected"


def test_a_forecast_is_announced_and_compared(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]):
    trainer = make_trainer(forecast=Words(), m6__training__total_steps=2)
    assert trainer.train()
    said = capsys.readouterr().err.splitlines()
    memory, step, outcome = (
        said.index(line) for line in ("memory of 2 samples, Real", "a step of 2 samples", "as expected")
    )
    assert memory < step < outcome == len(said) - 2
    assert said[-1] == f"finished {trainer.run.root} at step 2"


def test_without_a_forecast_nothing_is_predicted(make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]):
    trainer = make_trainer(m6__training__total_steps=1)
    assert trainer.train()
    assert "memory" not in capsys.readouterr().err
