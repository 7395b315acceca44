"""Stopping is a collective decision: a signal only sets a flag, and the ranks agree at a step boundary."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType


def stopping_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a rank to save and end.

    Not SIGTERM in a step of srun: there it says that another rank has failed, and a save would wait for that one.
    """
    asked = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    return asked if "SLURM_STEP_ID" in os.environ else (*asked, signal.SIGTERM)


@dataclass(frozen=True)
class Requests:
    """What a rank was asked for during a step. The ranks act together on the request of any of them."""

    stop: bool = False
    save: bool = False


class StopFlag:
    """True on a rank that was asked to stop. The loop adds the flag to a sum that it reduces anyway.

    To be made before anything slow is imported: a signal without a handler ends the process.
    """

    def __init__(self) -> None:
        self.raised = False
        self._numbers = stopping_signals()
        for number in self._numbers:
            signal.signal(number, self._raise)

    def ignore(self) -> None:
        """Ignores them from here on: one that is repeated must not hit a process on its way out."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.raised and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.raised = True
