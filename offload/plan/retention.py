"""Two rules for which chunks to keep on the device between two uses, given the free bytes at each moment."""

from __future__ import annotations

from collections.abc import Sequence

from offload.plan.trace import Interval


def retain_greedily(
    intervals: Sequence[Interval], weights: Sequence[int], order: Sequence[int], free_bytes: Sequence[int]
) -> set[int]:
    """Keeps each interval that fits, in the given order.

    Args:
        weights: the bytes of each interval; 0 if they are already subtracted from ``free_bytes``.
        order: the indices of the intervals to try.
        free_bytes: the free bytes at each moment.

    Returns:
        The indices of the intervals that are kept.
    """
    left, kept = list(free_bytes), set()
    for index in order:
        span = range(intervals[index].begin + 1, intervals[index].end)
        if not weights[index] or all(left[moment] >= weights[index] for moment in span):
            kept.add(index)
            for moment in span:
                left[moment] -= weights[index]
    return kept


def retain_by_belady(
    intervals: Sequence[Interval], weights: Sequence[int], candidates: Sequence[int], free_bytes: Sequence[int]
) -> set[int]:
    """Keeps every interval until there is no room, and then drops the one whose chunk is used last (Belady 1966).

    The arguments and the result are those of ``retain_greedily``; ``candidates`` may have any order.
    """
    starts: dict[int, list[int]] = {}
    for index in candidates:
        starts.setdefault(intervals[index].begin, []).append(index)
    held: set[int] = set()
    kept: set[int] = set()
    used = 0
    for moment in range(len(free_bytes)):
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
        while used > free_bytes[moment]:
            worst = max((index for index in held if weights[index]), key=lambda index: (intervals[index].end, index))
            held.remove(worst)
            used -= weights[worst]
    return kept
