"""What a step does: which chunk it uses when, and how much memory everything else needs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Moment:
    """From one use of a chunk to the next use of any.

    Attributes:
        chunk: the number of the chunk that is used.
        backward: whether gradients come out of this use.
        pinned: other chunks that are in use already, as the one whose backward pass recomputes a checkpointed block.
        nonmodel_bytes: the peak of all other memory of the device: activations, dense parameters, workspace.
        seconds: how long the computation took; 0 where nobody measured it.
    """

    chunk: int
    backward: bool = False
    pinned: tuple[int, ...] = ()
    nonmodel_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Interval:
    """From a use of a chunk to its next use in the same step: it can stay on the device or be fetched again.

    Attributes:
        begin, end: the two uses; moments ``begin + 1`` to ``end - 1`` lie between them.
        forced: the chunk is pinned all the time.
    """

    chunk: int
    begin: int
    end: int
    forced: bool


@dataclass(frozen=True)
class Trace:
    """One optimizer step: all its micro-batches, forward and backward.

    Attributes:
        moments: in order.
        outside_bytes: the peak of non-model memory from the last backward pass to the first use of a chunk.
    """

    moments: tuple[Moment, ...]
    outside_bytes: int = 0

    def intervals(self) -> Iterator[Interval]:
        last: dict[int, int] = {}
        for index, moment in enumerate(self.moments):
            if moment.chunk in last:
                begin = last[moment.chunk]
                forced = all(moment.chunk in self.moments[time].pinned for time in range(begin + 1, index))
                yield Interval(moment.chunk, begin, index, forced)
            last[moment.chunk] = index

    def repeat_last(self, num_moments: int, times: int) -> Trace:
        """With the last ``num_moments`` so many times more, as for micro-batches that are all alike."""
        return replace(self, moments=self.moments + self.moments[len(self.moments) - num_moments :] * times)

    def with_tide_of(self, other: Trace) -> Trace:
        """With the higher of both tides at every moment; that of ``other`` counts where it is of the same uses."""
        if [moment.chunk for moment in self.moments] != [moment.chunk for moment in other.moments]:
            return self
        moments = [
            replace(own, nonmodel_bytes=max(own.nonmodel_bytes, its.nonmodel_bytes))
            for own, its in zip(self.moments, other.moments, strict=True)
        ]
        return Trace(tuple(moments), max(self.outside_bytes, other.outside_bytes))

    def gradient_arrivals(self) -> dict[int, int]:
        """How often each chunk's gradient comes in a step."""
        arrivals: dict[int, int] = {}
        for moment in self.moments:
            if moment.backward:
                arrivals[moment.chunk] = arrivals.get(moment.chunk, 0) + 1
        return arrivals
