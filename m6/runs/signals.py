"""Requests to stop or save: a signal only sets a flag, and all ranks act on it together at the end of a step."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from types import FrameType


def stopping_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a rank to save and end.

    Under srun SIGTERM is not one of them: there it means that another rank failed, and a save would wait for it.
    """
    signals = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
    return signals if "SLURM_STEP_ID" in os.environ else (*signals, signal.SIGTERM)


@dataclass(frozen=True)
class Requests:
    """The requests that a rank received during a step. All ranks act on the request of any rank."""

    stop: bool = False
    save: bool = False


class StopFlag:
    """A flag that a stop signal sets on this rank. The loop reduces it together with the sums of the step.

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
        """Ignores the signals from now on, so that a repeated one does not interrupt the exit."""
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.raised and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C ends the process at once
        self.raised = True
