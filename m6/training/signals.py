"""Stopping is a collective decision: a signal only sets a flag, and the ranks agree at a step boundary."""

from __future__ import annotations

import signal
from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class StopFlag:
    """True on a rank that was asked to stop. The loop adds the flag to a sum that it reduces anyway."""

    def __init__(self) -> None:
        self.raised = False
        for number in _STOPPING:
            signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if self.raised and number == signal.SIGINT:
            raise KeyboardInterrupt  # a second Ctrl-C means now
        self.raised = True
