"""Stateless shuffling: maps the number of a sample to its objective, its source and its row.

Neighbouring rows are read together.

A block is a Parquet row group of about 1 MiB. A split of up to ``OPEN_BLOCKS`` blocks fits into memory, and each epoch
is a permutation of all its rows. A larger split is cut into lanes: contiguous ranges of rows of equal size. Each epoch
of a lane takes its blocks in a random order, ``OPEN_BLOCKS / lanes`` at a time, and shuffles the rows of these. So
about ``OPEN_BLOCKS`` blocks are open over all lanes, each block is read once in an epoch, and a rank reads only the
part of the split in its lanes.

A row depends only on its lane and its position in the lane, so any process can start at any position.

Samples are numbered globally from 0. Each block of consecutive numbers holds the same count of each (objective, source)
pair, shuffled within the block. Each epoch of a source is a permutation of all its rows. Therefore the number of the
next sample is all the state needed to resume a run, also with other numbers of ranks and workers.

Sources too large for memory are read in lanes: each step's samples are cut into equal contiguous parts, one for each
lane. Ranks read contiguous parts of a step too, so each rank reads few lanes. The lanes take the pairs in the same
cyclic order from different starting points, so together they hold the right count of each pair.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
        lanes: number of lanes. Positions are counted separately in each lane.
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
        if self._fits_into_memory:  # lanes are interleaved, so together they read each row once in an epoch
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
        blocks_at_once: number of blocks shuffled together.
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

    A Feistel network permutes a range of ``4 ** n >= size`` numbers. A result outside ``range(size)`` goes through the
    network again until it is inside (cycle walking).

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
    """Mixes 64 bits by the finaliser of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(mix(mix(key) + number) for number in range(_FEISTEL_ROUNDS))


BLOCK = 1000


"""Samples of a block. A block is larger if it would hold less than one sample of some pair."""


_LONGEST_BLOCK, _LEAST_SAMPLES = 10**6, 10
_Block = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]


"""For each slot, the index of its pair and its rank among the slots of its source. For each lane and source, the number
of the source's slots before the lane's first slot."""


@dataclass(frozen=True)
class Draw:
    """One sample of the mixture.

    Attributes:
        objective: name of the objective.
        source: name of the source.
        lane: the lane of the sample.
        position: position in the lane's rows of the source, counted through all epochs.
        seed: seed of the objective's random choices.
    """

    objective: str
    source: str
    lane: int
    position: int
    seed: int


class Mixture:
    """Maps a sample number to a Draw.

    Args:
        weights: relative weight of each (objective, source) pair, all positive.
        blocks: rows of each block of each source, see ``RowOrder``.
        seed: seed of the run.
        samples_per_step: samples of a step over all ranks. It matters only to sources too large for memory.

    Attributes:
        block_size: samples of a block.
        rows_per_block: samples of each source in a block.
    """

    def __init__(
        self,
        weights: Mapping[tuple[str, str], float],
        blocks: Mapping[str, Sequence[int] | NDArray[np.int64]],
        seed: int,
        samples_per_step: int = 1,
    ) -> None:
        # Sorted, to make the data independent of the order of keys in the JSON.
        self._cells = sorted(weights)
        self._seed = seed
        self._samples_per_step = samples_per_step
        is_large = any(len(sizes) > OPEN_BLOCKS for sizes in blocks.values())
        self._lanes = math.gcd(samples_per_step, OPEN_BLOCKS) if is_large else 1
        self._orders = {
            source: RowOrder(sizes, functools.partial(_epoch_key, seed, source), self._lanes)
            for source, sizes in blocks.items()
        }
        counts = _apportion(np.array([weights[cell] for cell in self._cells], np.float64))
        self.block_size = int(counts.sum())
        self._slots = np.repeat(np.arange(len(self._cells)), counts)
        # Every block reads the same number of rows of a source, so a position follows from the block's number.
        self.rows_per_block = {
            source: int(sum(count for cell, count in zip(self._cells, counts, strict=True) if cell[1] == source))
            for _, source in self._cells
        }
        sources = {source: index for index, source in enumerate(self.rows_per_block)}
        self._source_of = np.array([sources[source] for _, source in self._cells])
        self._cached_block: tuple[int, _Block] | None = None

    def draw(self, number: int) -> Draw:
        """Returns the sample with a global number, counted from 0."""
        step, place = divmod(number, self._samples_per_step)
        samples = self._samples_per_step // self._lanes  # of a lane in a step
        lane, place = divmod(place, samples)
        block, offset = divmod(step * samples + place, self.block_size)
        slot = (self._first_slot(lane) + offset) % self.block_size
        cells, ranks, before = self._block(block)
        cell = int(cells[slot])
        objective, source = self._cells[cell]
        # Rows of the source between the lane's first slot and this one, modulo the block.
        rank = (int(ranks[slot]) - int(before[lane, self._source_of[cell]])) % self.rows_per_block[source]
        # The seed depends on the sample's number, not on the row: a row is corrupted differently in each epoch.
        seed = mix(mix(self._seed) ^ number)
        return Draw(objective, source, lane, block * self.rows_per_block[source] + rank, seed)

    def row(self, draw: Draw, attempt: int = 0) -> int:
        """Returns the row of a sample; after ``attempt`` bad rows, a later one in the lane's order."""
        return self._orders[draw.source].row(draw.position + attempt, draw.lane)

    def _first_slot(self, lane: int) -> int:
        return lane * self.block_size // self._lanes

    def _block(self, block: int) -> _Block:
        # Consecutive samples lie in the same block, so a cache of one block suffices.
        if self._cached_block is None or self._cached_block[0] != block:
            cells = np.random.default_rng([self._seed, block]).permutation(self._slots)
            sources = self._source_of[cells]
            rows = np.array(list(self.rows_per_block.values()))
            ranks = np.empty(len(cells), np.int32)
            ranks[np.argsort(sources, kind="stable")] = np.concatenate([np.arange(count) for count in rows])
            bounds = [self._first_slot(lane) for lane in range(self._lanes)]
            parts = [np.bincount(part, minlength=len(rows)) for part in np.split(sources, bounds[1:])]
            before = np.cumsum([np.zeros_like(rows), *parts[:-1]], axis=0)
            self._cached_block = (block, (cells, ranks, before))
        return self._cached_block[1]


def _apportion(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the samples of each pair in a block, in proportion to the weights; each is at least 1.

    Rounding is by the largest remainder. If BLOCK samples hold less than one of a pair, the block is enlarged to hold
    ten: a block of fixed size would read the rows of a small source hundreds of times.
    """
    shares = weights / weights.sum()
    size = BLOCK
    if shares.min() * BLOCK < 1 - 1e-9:
        while shares.min() * size < _LEAST_SAMPLES and size < _LONGEST_BLOCK:
            size *= 10
    # One sample of each pair is fixed; the others are distributed by weight.
    spare = size - len(weights)
    quota = np.maximum(shares * size - 1, 0)
    quota *= spare / quota.sum() if quota.sum() else 0
    counts = np.floor(quota).astype(np.int64)
    order = np.argsort(counts - quota, kind="stable")
    counts[order[: spare - counts.sum()]] += 1
    return counts + 1


@functools.lru_cache(maxsize=256)
def _epoch_key(seed: int, source: str, epoch: int) -> int:
    # Python's hash() would differ between processes.
    return int.from_bytes(hashlib.blake2b(f"{seed}/{source}/{epoch}".encode(), digest_size=8).digest(), "big")
