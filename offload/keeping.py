"""Which intervals between two uses of a chunk fit into the room that is left: two rules."""

from __future__ import annotations

from collections.abc import Sequence

from offload.trace import Interval


def fill(intervals: Sequence[Interval], weights: Sequence[int], order: Sequence[int], room: Sequence[int]) -> set[int]:
    """Keeps each interval, in this order, where it fits.

    Args:
        weights: bytes of each interval; 0 where its room is not counted.
        order: numbers of intervals.
        room: bytes at each moment.
    """
    left, kept = list(room), set()
    for index in order:
        span = range(intervals[index].begin + 1, intervals[index].end)
        if not weights[index] or all(left[moment] >= weights[index] for moment in span):
            kept.add(index)
            for moment in span:
                left[moment] -= weights[index]
    return kept


def sweep(
    intervals: Sequence[Interval], weights: Sequence[int], candidates: Sequence[int], room: Sequence[int]
) -> set[int]:
    """Keeps everything, and drops what is used last where there is no room (Belady 1966); arguments as of ``fill``."""
    starts: dict[int, list[int]] = {}
    for index in candidates:
        starts.setdefault(intervals[index].begin, []).append(index)
    held: set[int] = set()
    kept: set[int] = set()
    used = 0
    for moment in range(len(room)):
        for index in [index for index in held if intervals[index].end <= moment]:
            held.remove(index)
            kept.add(index)
            used -= weights[index]
        for index in starts.get(moment - 1, []):
            if intervals[index].end == moment:
                kept.add(index)
            else:
                held.add(index)
                used += weights[index]
        while used > room[moment]:
            worst = max((index for index in held if weights[index]), key=lambda index: (intervals[index].end, index))
            held.remove(worst)
            used -= weights[worst]
    return kept
