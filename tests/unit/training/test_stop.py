"""Stopping: by a signal or by RUN/STOP, after the step, with a checkpoint; and going on from there."""

import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from m6.checkpoints.discovery import complete_checkpoints
from m6.runs.signals import StopFlag
from m6.training.loop import Trainer


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield StopFlag()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_raises_the_flag_and_nothing_else(flag: StopFlag, number: signal.Signals):
    assert not flag.raised
    os.kill(os.getpid(), number)
    assert flag.raised


def test_ctrl_c_once_more_means_now(flag: StopFlag):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_scheduler_may_repeat_itself(flag: StopFlag):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert flag.raised


def lines(trainer: Trainer) -> list[dict]:
    return [json.loads(line) for line in trainer.run.metrics.read_text().splitlines()]


def numbers(trainer: Trainer) -> list[tuple]:
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen", "validation", "experts")
    return [tuple(entry.get(key) for key in keys) for entry in lines(trainer)]


@pytest.mark.parametrize("how", ["signal", "file"])
def test_a_stop_saves_after_the_step_and_the_run_goes_on(make_trainer: Callable[..., Trainer], how: str):
    changes = {"m6__training__total_steps": 6, "m6__evaluation__interval_steps": 2}
    whole = make_trainer("whole", **changes)
    whole.train()
    trainer = make_trainer(**changes)
    stop_file = trainer.run.root / "STOP"
    train_step = trainer.train_step

    def stopping_step(step: int, *arguments: object) -> object:
        if step == 2:  # in the middle of the third step: the ranks hear of it at its end
            os.kill(os.getpid(), signal.SIGTERM) if how == "signal" else stop_file.touch()
        return train_step(step, *arguments)

    stopping_step.health, stopping_step.noise = train_step.health, train_step.noise
    trainer.train_step = stopping_step
    assert trainer.train() is False
    assert trainer.step == 3
    assert [path.name for path in complete_checkpoints(trainer.run.checkpoints)][-1] == "step_00000003"
    assert not (trainer.run.root / "DONE").exists()
    stop_file.unlink(missing_ok=True)

    assert make_trainer(**changes).train() is True
    assert numbers(trainer) == numbers(whole)
    assert (trainer.run.root / "DONE").read_text() == "6\n"


def test_a_finished_run_has_nothing_left_to_do(make_trainer: Callable[..., Trainer]):
    trainer = make_trainer()
    assert trainer.train() is True
    before = trainer.run.metrics.read_bytes()
    again = make_trainer()
    assert again.train() is True
    assert (again.step, again.samples_seen) == (4, 32)
    assert trainer.run.metrics.read_bytes() == before


def test_a_finished_run_becomes_longer(make_trainer: Callable[..., Trainer]):
    """With a constant learning rate, twice three steps are six steps to the bit."""
    constant = {"m6__schedule__decay": "constant", "m6__evaluation__interval_steps": 3}
    whole = make_trainer("whole", m6__training__total_steps=6, **constant)
    assert whole.train()
    short = make_trainer(m6__training__total_steps=3, **constant)
    assert short.train()
    assert short.run.is_done(3)
    longer = make_trainer(m6__training__total_steps=6, **constant)
    assert not (longer.run.root / "DONE").exists()
    assert longer.train()
    assert (longer.run.root / "DONE").read_text() == "6\n"
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens_seen")
    curves = [[[line.get(key) for key in keys] for line in lines(trainer)] for trainer in (whole, longer)]
    assert curves[0] == curves[1]


def test_the_learning_rate_follows_the_longer_schedule(
    make_trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
):
    """It jumps, because the shorter one had ended: the log says from where to where."""
    make_trainer(m6__training__total_steps=3).train()
    assert "the learning rate goes on" not in capsys.readouterr().err
    longer = make_trainer(m6__training__total_steps=6)
    longer.train()
    jumps = [line for line in capsys.readouterr().err.splitlines() if "the learning rate goes on" in line]
    rate = next(line["learning_rate"] for line in lines(longer) if line["step"] == 4)
    final = longer.settings.schedule.final_lr_ratio * 1e-3
    assert jumps == [
        f"warning: the learning rate goes on at {rate:.4g}; with the settings of the checkpoint it would be "
        f"{final:.4g}. m6.training.total_steps, m6.schedule or optimizer.params.lr has changed"
    ]
    whole = make_trainer("whole", m6__training__total_steps=6)
    whole.train()
    rates = [
        [line["learning_rate"] for line in lines(trainer) if line["step"] > 3 and "learning_rate" in line]
        for trainer in (longer, whole)
    ]
    assert rates[0] == rates[1]
    assert len(rates[0]) == 3
