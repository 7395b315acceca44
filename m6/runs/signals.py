"""Signals to a rank.

A request to stop or save only sets a flag, and all ranks act on it together at the end of a step. If the launcher dies,
its ranks die too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType

from m6.data.workers import end_with_parent

# torchrun and the deepspeed launcher set one of these variables for their processes.
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")


def stopping_signals() -> tuple[signal.Signals, ...]:
    """The signals by which a rank is asked to save and end.

    Under srun SIGTERM is not one of them: srun sends it after another rank failed, and a save would wait for that rank.
    """
    signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    return signals if "SLURM_STEP_ID" in os.environ else (*signals, signal.SIGTERM)


def end_with_launcher() -> None:
    """Asks Linux to kill this rank when its launcher dies; does nothing for a process without a launcher.

    torchrun and deepspeed end their ranks when they are told to end. A killed launcher cannot, and its ranks would
    train on concurrently with the next attempt.
    """
    if any(name in os.environ for name in _LAUNCHERS):
        end_with_parent()


@dataclass(frozen=True)
class Requests:
    """The requests to a rank during a step. All ranks act on the request of any rank."""

    stop: bool = False
    save: bool = False

    @classmethod
    def of_all(cls, requests: Iterable[Requests]) -> Requests:
        """The union of the requests of several ranks."""
        found = list(requests)
        return cls(stop=any(each.stop for each in found), save=any(each.save for each in found))


class StopFlag:
    """A flag, set on this rank by a stop signal. The loop reduces it together with the sums of the step.

    Create it before slow imports: a signal without a handler ends the process.

    Attributes:
        raised: whether a signal has arrived.
    """

    def __init__(self) -> None:
        self.raised = False
        self._numbers = stopping_signals()
        for number in self._numbers:
            signal.signal(number, self._raise)

    def ignore(self) -> None:
        """Ignores the signals from now on, so a repeated one does not interrupt the exit."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.raised and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C ends the process at once
        self.raised = True
