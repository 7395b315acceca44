"""The order in which the rows of a split are read: shuffled, yet neighbouring rows are read together.

Shards are read in blocks, which are their Parquet row groups of about 1 MiB. A split of up to ``OPEN_BLOCKS`` blocks
fits into memory, and each epoch is a permutation of all its rows. A larger split is cut into lanes: contiguous ranges
of rows of equal size. Each epoch of a lane takes its blocks in a random order, ``OPEN_BLOCKS / lanes`` at a time, and
shuffles the rows of these. So about ``OPEN_BLOCKS`` blocks are open at once over all lanes, each block is read once in
an epoch, and a rank that reads some of the lanes reads only their part of the split.

A row follows from its lane and its position there alone, so any process can start at any position.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

OPEN_BLOCKS = 64
_FEISTEL_ROUNDS = 6
_MASK64 = (1 << 64) - 1


class RowOrder:
    """Maps positions, counted through all epochs, to rows.

    Args:
        block_sizes: rows of each block of the split, in the order of the rows.
        key: epoch -> key of its permutations.
        lanes: number of lanes, each of which is read by positions of its own.
    """

    def __init__(
        self, block_sizes: Sequence[int] | NDArray[np.int64], key: Callable[[int], int], lanes: int = 1
    ) -> None:
        ends = np.cumsum(np.asarray(block_sizes, np.int64))
        self.size = int(ends[-1]) if len(ends) else 0
        self._ends, self._key, self._lanes = ends, key, lanes
        self._fits_into_memory = len(ends) <= OPEN_BLOCKS
        self._epochs: dict[int, _LaneEpoch] = {}

    def row(self, position: int, lane: int = 0) -> int:
        """Returns the row at a position of a lane."""
        if self._fits_into_memory:  # the lanes take turns, so that all of them together read each row once in an epoch
            epoch, index = divmod(position * self._lanes + lane, self.size)
            return permuted(index, self.size, self._key(epoch))
        first, end = (self.size * bound // self._lanes for bound in (lane, lane + 1))
        epoch, index = divmod(position, end - first)
        current = self._epochs.get(lane)
        if current is None or current.epoch != epoch:
            inner = self._ends[np.searchsorted(self._ends, first, "right") : np.searchsorted(self._ends, end, "left")]
            bounds = np.concatenate([[first], inner, [end]])
            blocks_at_once = max(1, OPEN_BLOCKS // self._lanes)
            current = self._epochs[lane] = _LaneEpoch(epoch, bounds, mix(self._key(epoch) + lane), blocks_at_once)
        return current.row(index)


class _LaneEpoch:
    """One epoch of one lane.

    Args:
        epoch: its number.
        bounds: first row of each block of the lane, and the end of the last one.
        key: key of its permutations.
        blocks_at_once: number of blocks whose rows are shuffled together.
    """

    def __init__(self, epoch: int, bounds: NDArray[np.int64], key: int, blocks_at_once: int) -> None:
        self.epoch, self._key, self._at_once = epoch, key, blocks_at_once
        order = np.random.default_rng(key).permutation(len(bounds) - 1)
        self._firsts = bounds[:-1][order]
        self._ends = np.cumsum(np.diff(bounds)[order])  # of the blocks, in positions
        last_of_windows = np.arange(blocks_at_once, len(order) + blocks_at_once, blocks_at_once) - 1
        self._window_ends = self._ends[np.minimum(last_of_windows, len(order) - 1)]

    def row(self, index: int) -> int:
        window = int(np.searchsorted(self._window_ends, index, "right"))
        begin = int(self._window_ends[window - 1]) if window else 0
        size = int(self._window_ends[window]) - begin
        place = begin + permuted(index - begin, size, mix(self._key + window))
        block = int(np.searchsorted(self._ends, place, "right"))
        return int(self._firsts[block]) + place - (int(self._ends[block - 1]) if block else 0)


def permuted(index: int, size: int, key: int) -> int:
    """Returns the image of ``index`` under a pseudorandom permutation of ``range(size)``, in constant memory.

    A Feistel network permutes a range of ``4 ** n >= size`` numbers. Where the result is outside of ``range(size)``,
    the network is applied again until it is inside (cycle walking).

    Args:
        index: in ``range(size)``.
        size: number of elements.
        key: selects the permutation.
    """
    # The range has at most 4 * size numbers, so at most 4 applications are needed on average.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = _round_keys(key)
    while True:
        left, right = index >> half, index & mask
        for round_key in keys:
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


def mix(value: int) -> int:
    """The finaliser of splitmix64, which maps 64 bits to 64 well mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(mix(key) + number) for number in range(_FEISTEL_ROUNDS))
