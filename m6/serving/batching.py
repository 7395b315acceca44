"""Which waiting requests run together: length-aware batching by dynamic programming.

A batch is padded to its longest request, so mixed lengths waste work, and single requests waste what a batch shares.
TurboTransformers (arXiv 2010.05680) sorts the requests that wait by length and cuts the sorted list where the total
time is least. With lengths l_1 <= ... <= l_n and t(l, b) the measured time of b requests padded to l,

    T(0) = 0,    T(i) = min over 1 <= b <= min(i, max_batch_size) of T(i - b) + t(l_i, b)

in O(n max_batch_size). Among all ways to divide the requests, contiguous ones or not, none takes less time, provided
that t grows with l: the batch of the longest request may take its other members from the next longest for free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

BatchPlanner = Callable[[Sequence[int]], list[list[int]]]
"""From the lengths of n requests, in order of arrival, to batches of their indices."""


class CostTable:
    """t(l, b), linear between measured points and constant outside of them; grows with both, whatever was measured.

    Args:
        lengths: L increasing.
        batch_sizes: B increasing.
        seconds: [L, B].
    """

    def __init__(self, lengths: Sequence[int], batch_sizes: Sequence[int], seconds: NDArray[np.float64]) -> None:
        self.lengths, self.batch_sizes = list(lengths), list(batch_sizes)
        self.seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        sizes = np.arange(self.batch_sizes[-1] + 1)
        between = np.array([np.interp(sizes, self.batch_sizes, row) for row in self.seconds])
        places = np.arange(self.lengths[-1] + 1)
        self._table = np.array([np.interp(places, self.lengths, column) for column in between.T]).T

    def __call__(self, length: int, batch_size: int) -> float:
        """Seconds of ``batch_size`` requests padded to ``length``."""
        longest, largest = self._table.shape
        return float(self._table[min(length, longest - 1), min(batch_size, largest - 1)])


def measure_costs(
    run: Callable[[int, int], object],
    lengths: Sequence[int],
    batch_sizes: Sequence[int],
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Times ``run(length, batch_size)`` at every point, the least of ``repeats`` after one that warms up."""
    seconds = np.empty((len(lengths), len(batch_sizes)))
    run(lengths[0], batch_sizes[0])
    for row, length in enumerate(lengths):
        for column, batch_size in enumerate(batch_sizes):
            times = []
            for _ in range(repeats):
                begin = clock()
                run(length, batch_size)
                times.append(clock() - begin)
            seconds[row, column] = min(times)
    return CostTable(lengths, batch_sizes, seconds)


def cost_grid(shortest: int, longest: int, max_batch_size: int) -> tuple[list[int], list[int]]:
    """Where costs are measured: three lengths, and powers of two up to the largest batch."""
    lengths = {shortest, round((shortest * longest) ** 0.5), longest}
    sizes = {min(2**power, max_batch_size) for power in range(max_batch_size.bit_length() + 1)}
    return sorted(lengths), sorted(sizes)


def plan_by_length(
    lengths: Sequence[int], seconds: Callable[[int, int], float], max_batch_size: int
) -> list[list[int]]:
    """The batches that take the least time in total.

    Args:
        lengths: of n requests.
        seconds: t(l, b), which does not fall with l.
        max_batch_size: most requests of a batch.

    Returns:
        Indices of each batch, the shortest requests first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    total, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        starts = range(max(0, end - max_batch_size), end)
        best, begin = min((total[start] + seconds(longest, end - start), start) for start in starts)
        total.append(best)
        begins.append(begin)
    batches: list[list[int]] = []
    end = len(order)
    while end:
        batches.append(order[begins[end] : end])
        end = begins[end]
    return batches[::-1]


def plan_by_arrival(lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
    """The naive plan: full batches in order of arrival, whatever their lengths."""
    return [
        list(range(begin, min(begin + max_batch_size, len(lengths))))
        for begin in range(0, len(lengths), max_batch_size)
    ]
