"""Records the trace of a running step, the basis of the plan for later steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Protocol

from offload.devices.device import Event, Peaks
from offload.plan.trace import Moment, Trace


class StepProbe(Protocol):
    """The methods of ``Device`` for measuring memory and time."""

    def begin_moment(self, number: int) -> Peaks:
        """Starts a moment and returns the peaks of the last one."""

    def mark(self) -> Event:
        """Returns a point in the computation."""

    def seconds_between(self, begin: Event, end: Event) -> float:
        """Returns the time between two marks."""


class StepRecorder:
    """Records the moments of the running step, with their memory and times.

    Args:
        uses_at_once: see ``OffloadRuntime``.

    Attributes:
        timed: whether to measure the times. ``finish`` then waits for the device. Otherwise they are 0.
    """

    def __init__(self, probe: StepProbe, uses_at_once: int) -> None:
        self._probe, self._uses_at_once = probe, uses_at_once
        self.timed = True
        self._restart()

    def _restart(self) -> None:
        self._moments: list[Moment] = []
        self._peaks: list[Peaks] = []
        self._arrivals: list[Event] = []
        self._starts: list[Event] = []
        self._outside_bytes = 0
        self._backward_uses: Counter[int] = Counter()

    def arrive(self, chunk: int, backward: bool, pinned: tuple[int, ...]) -> None:
        """Records the begin of a use of a chunk; its weights need not be on the device yet."""
        if self.timed:
            self._arrivals.append(self._probe.mark())
        self._note_peaks()
        self._backward_uses[chunk] += backward
        adds_up = backward and self._backward_uses[chunk] % self._uses_at_once > 0
        self._moments.append(Moment(chunk, backward, pinned, adds_up=adds_up))

    def start(self) -> None:
        """Records the start of the computation, with the weights on the device."""
        if self.timed:
            self._starts.append(self._probe.mark())

    def finish(self) -> tuple[Trace, tuple[Peaks, ...]] | None:
        """Ends the step and returns its trace and the peaks of each moment; None if it used no chunk."""
        if not self._moments:
            return None
        self._note_peaks()
        if self.timed:
            # From the end of one wait for weights to the begin of the next: this is the time of the computation only.
            ends = [*self._arrivals[1:], self._probe.mark()]
            seconds = [max(0.0, self._probe.seconds_between(*span)) for span in zip(self._starts, ends, strict=True)]
            self._moments = [replace(moment, seconds=time) for moment, time in zip(self._moments, seconds, strict=True)]
        found = Trace(tuple(self._moments), self._outside_bytes), tuple(self._peaks)
        self._restart()
        return found

    def _note_peaks(self) -> None:
        """Stores the peaks of the current moment at its end, or of the time before the first moment."""
        peaks = self._probe.begin_moment(len(self._moments))
        if self._moments:
            self._moments[-1] = replace(self._moments[-1], nonmodel_bytes=peaks.nonmodel)
            self._peaks.append(peaks)
        else:
            self._outside_bytes = peaks.nonmodel
