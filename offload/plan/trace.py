"""The trace of a step: its uses of chunks in order, and the memory of everything else at each use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Moment:
    """The time from one use of a chunk to the next use of any chunk, as in PatrickStar (arXiv 2108.05818).

    Attributes:
        chunk: the number of the chunk in use.
        backward: whether this use computes the chunk's gradients.
        pinned: other chunks in use at this time. Reentrant activation checkpointing nests uses.
        nonmodel_bytes: the peak of all other memory on the device: activations, dense parameters, workspace.
        seconds: how long the computation took; 0 if it was not measured.
        adds_up: whether the use's gradients stay on the device, to be added to those of the chunk's next use.
    """

    chunk: int
    backward: bool = False
    pinned: tuple[int, ...] = ()
    nonmodel_bytes: int = 0
    seconds: float = 0.0
    adds_up: bool = False

    @property
    def sends_gradient(self) -> bool:
        """Whether gradients leave the computation after this use."""
        return self.backward and not self.adds_up


@dataclass(frozen=True)
class Interval:
    """The time between two uses of a chunk in a step. Meanwhile the chunk can stay on the device or be dropped.

    Attributes:
        chunk: the chunk's number.
        begin, end: the moments of the two uses; moments ``begin + 1`` to ``end - 1`` lie between them.
        forced: the chunk is pinned all the time, so it cannot be dropped.
    """

    chunk: int
    begin: int
    end: int
    forced: bool


@dataclass(frozen=True)
class Trace:
    """One optimizer step: the forward and backward passes of all its micro-batches.

    Attributes:
        moments: in the order of the uses.
        outside_bytes: the peak of non-model memory from the last backward pass to the first use of a chunk.
    """

    moments: tuple[Moment, ...]
    outside_bytes: int = 0

    def intervals(self) -> Iterator[Interval]:
        """Yields the intervals between two uses of a chunk, in the order of their ends."""
        last: dict[int, int] = {}
        for index, moment in enumerate(self.moments):
            if moment.chunk in last:
                begin = last[moment.chunk]
                forced = all(moment.chunk in self.moments[time].pinned for time in range(begin + 1, index))
                yield Interval(moment.chunk, begin, index, forced)
            last[moment.chunk] = index

    def repeat_last(self, num_moments: int, times: int) -> Trace:
        """Appends the last ``num_moments`` moments ``times`` more times, for further micro-batches of equal size."""
        return replace(self, moments=self.moments + self.moments[len(self.moments) - num_moments :] * times)

    def with_nonmodel_bytes_of(self, other: Trace) -> Trace:
        """Returns this trace with the larger non-model bytes of the two traces at every moment.

        If ``other`` has different uses it is ignored.
        """
        if [moment.chunk for moment in self.moments] != [moment.chunk for moment in other.moments]:
            return self
        moments = [
            replace(mine, nonmodel_bytes=max(mine.nonmodel_bytes, theirs.nonmodel_bytes))
            for mine, theirs in zip(self.moments, other.moments, strict=True)
        ]
        return Trace(tuple(moments), max(self.outside_bytes, other.outside_bytes))

    def first_uses(self, backward: bool) -> dict[int, int]:
        """Returns the moment of each chunk's first use; if ``backward``, of the first one in a backward pass."""
        moments = [(time, moment) for time, moment in enumerate(self.moments) if moment.backward or not backward]
        return {moment.chunk: time for time, moment in reversed(moments)}

    def gradients_per_chunk(self) -> dict[int, int]:
        """Returns how many gradients each chunk gets in a step; chunks without any are missing."""
        counts: dict[int, int] = {}
        for moment in self.moments:
            if moment.sends_gradient:
                counts[moment.chunk] = counts.get(moment.chunk, 0) + 1
        return counts
