"""Notes what a step does while it does it: from that the next ones are planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from offload.device import Event, Peaks
from offload.trace import Moment, Trace


class Gauge(Protocol):
    """What is asked of a device; see there."""

    def begin_moment(self, number: int) -> Peaks: ...

    def mark(self) -> Event: ...

    def seconds_between(self, begin: Event, end: Event) -> float: ...


class StepRecorder:
    """The moments of the step that is under way."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._restart()

    def _restart(self) -> None:
        self._moments: list[Moment] = []
        self._peaks: list[Peaks] = []
        self._arrivals: list[Event] = []
        self._starts: list[Event] = []
        self._outside_bytes = 0

    def arrive(self, chunk: int, backward: bool, pinned: tuple[int, ...]) -> None:
        """A use of a chunk begins, whose weights need not be there yet."""
        self._arrivals.append(self._gauge.mark())
        self._note_peaks()
        self._moments.append(Moment(chunk, backward, pinned))

    def start(self) -> None:
        """The computation has the weights."""
        self._starts.append(self._gauge.mark())

    def finish(self) -> tuple[Trace, tuple[Peaks, ...]] | None:
        """The step's trace and the peaks of each moment; None where it used no chunk. The next step begins."""
        if not self._moments:
            return None
        self._note_peaks()
        # From behind a moment's wait to before the next one's: the computation alone.
        ends = [*self._arrivals[1:], self._gauge.mark()]
        seconds = [max(0.0, self._gauge.seconds_between(*span)) for span in zip(self._starts, ends, strict=True)]
        moments = (replace(moment, seconds=time) for moment, time in zip(self._moments, seconds, strict=True))
        found = Trace(tuple(moments), self._outside_bytes), tuple(self._peaks)
        self._restart()
        return found

    def _note_peaks(self) -> None:
        """Those of the moment that ends, or of the time before the first."""
        peaks = self._gauge.begin_moment(len(self._moments))
        if self._moments:
            self._moments[-1] = replace(self._moments[-1], nonmodel_bytes=peaks.nonmodel)
            self._peaks.append(peaks)
        else:
            self._outside_bytes = peaks.nonmodel
