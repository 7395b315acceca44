"""Length-aware batching by dynamic programming: which waiting requests run together.

A batch is padded to its longest request. Large batches with mixed lengths waste time on padding; small batches waste
the parallelism of the device. TurboTransformers (arXiv 2010.05680) sorts the waiting requests by length and cuts the
sorted list so that the total time is minimal. With lengths l_1 <= ... <= l_n and t(l, b) the measured time of b
requests padded to l,

    T(0) = 0,    T(i) = min over 1 <= b <= min(i, max_batch_size) of T(i - b) + t(l_i, b)

in O(n max_batch_size). If t does not decrease with l, no other division into batches is faster, contiguous or not:
exchanging the other members of the longest request's batch for the next longest requests costs nothing there, and
shortens the other batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

BatchPlanner = Callable[[Sequence[int]], list[list[int]]]
"""Maps the lengths of n requests, in order of arrival, to batches of their indices."""


class CostTable:
    """The time t(l, b) of a batch: linear between measured points, constant outside of them.

    Measurements are noisy, so the table is made monotone in both arguments.

    Args:
        lengths: L measured lengths, increasing.
        batch_sizes: B measured batch sizes, increasing.
        seconds: [L, B] measured times.
    """

    def __init__(self, lengths: Sequence[int], batch_sizes: Sequence[int], seconds: NDArray[np.float64]) -> None:
        self.lengths, self.batch_sizes = list(lengths), list(batch_sizes)
        self.seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=0), axis=1)
        sizes = np.arange(self.batch_sizes[-1] + 1)
        by_size = np.array([np.interp(sizes, self.batch_sizes, row) for row in self.seconds])
        all_lengths = np.arange(self.lengths[-1] + 1)
        self._table = np.array([np.interp(all_lengths, self.lengths, column) for column in by_size.T]).T

    def __call__(self, length: int, batch_size: int) -> float:
        """Returns the seconds of ``batch_size`` requests padded to ``length``."""
        longest, largest = self._table.shape
        return float(self._table[min(length, longest - 1), min(batch_size, largest - 1)])


def measure_costs(
    run: Callable[[int, int], object],
    lengths: Sequence[int],
    batch_sizes: Sequence[int],
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measures ``run(length, batch_size)`` at every point of the grid.

    Args:
        run: runs a batch of the given size and length.
        lengths: lengths of the grid, increasing.
        batch_sizes: batch sizes of the grid, increasing.
        repeats: runs per point; the least time is taken. One run before all others warms up.
        clock: returns seconds.
    """
    seconds = np.empty((len(lengths), len(batch_sizes)))
    run(lengths[0], batch_sizes[0])
    for row, length in enumerate(lengths):
        for column, batch_size in enumerate(batch_sizes):
            seconds[row, column] = least_seconds(run, length, batch_size, repeats, clock)
    return CostTable(lengths, batch_sizes, seconds)


def least_seconds(
    run: Callable[[int, int], object],
    length: int,
    batch_size: int,
    repeats: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the least time of several runs: it is the closest to the time without interference."""
    times = []
    for _ in range(repeats):
        begin = clock()
        run(length, batch_size)
        times.append(clock() - begin)
    return min(times)


def cost_grid(shortest: int, longest: int, max_batch_size: int) -> tuple[list[int], list[int]]:
    """Returns the lengths and batch sizes to measure: three lengths, and powers of two up to the largest batch."""
    # Sets, because points coincide for small limits. The middle length is the geometric mean.
    lengths = {shortest, round((shortest * longest) ** 0.5), longest}
    sizes = {min(2**power, max_batch_size) for power in range(max_batch_size.bit_length() + 1)}
    return sorted(lengths), sorted(sizes)


def plan_by_length(
    lengths: Sequence[int], seconds: Callable[[int, int], float], max_batch_size: int
) -> list[list[int]]:
    """Returns the division into batches with the least total time.

    Args:
        lengths: lengths of n requests.
        seconds: t(l, b), which must not decrease with l.
        max_batch_size: most requests of a batch.

    Returns:
        The indices of each batch; batches and indices are sorted by length, shortest first.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    total, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        starts = range(max(0, end - max_batch_size), end)
        best, begin = min((total[start] + seconds(longest, end - start), start) for start in starts)
        total.append(best)
        begins.append(begin)
    # Follow the best cuts back from the longest request.
    batches: list[list[int]] = []
    end = len(order)
    while end:
        batches.append(order[begins[end] : end])
        end = begins[end]
    return batches[::-1]


def plan_by_arrival(lengths: Sequence[int], max_batch_size: int) -> list[list[int]]:
    """Returns full batches in order of arrival, without regard to lengths. It is the baseline of the benchmark."""
    return [
        list(range(begin, min(begin + max_batch_size, len(lengths))))
        for begin in range(0, len(lengths), max_batch_size)
    ]
