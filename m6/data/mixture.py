"""Maps the number of a sample to an objective, a source and a row, without any state.

Samples are numbered globally from 0. Each block of BLOCK consecutive numbers holds the same count of each (objective,
source) pair, in an order that is shuffled per block. Each epoch of a source is a permutation of all its rows. A run can
therefore resume, or change its number of ranks and workers, with the number of the next sample alone.
"""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from m6.errors import UserError

BLOCK = 1000
_FEISTEL_ROUNDS = 6
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Draw:
    """One sample of the mixture.

    Attributes:
        objective: name of the objective.
        source: name of the source.
        position: position in the source's rows, counted through all epochs.
        row: row of the source.
        seed: seed of the objective's random choices.
    """

    objective: str
    source: str
    position: int
    row: int
    seed: int


class Mixture:
    """Maps a sample number to a Draw.

    Args:
        weights: relative weight of each (objective, source) pair, all positive.
        sizes: number of rows of each source, all positive.
        seed: seed of the run.

    Raises:
        UserError: there are more pairs than samples in a block.
    """

    def __init__(self, weights: Mapping[tuple[str, str], float], sizes: Mapping[str, int], seed: int) -> None:
        # Sorted, so that the order of the settings in the JSON does not change the data.
        self._cells = sorted(weights)
        self._sizes = dict(sizes)
        self._seed = seed
        counts = _apportion(np.array([weights[cell] for cell in self._cells], np.float64))
        self._slots = np.repeat(np.arange(len(self._cells)), counts)
        # Every block reads the same number of rows of a source, so a position follows from the block's number.
        self._rows_per_block = {
            source: int(sum(count for cell, count in zip(self._cells, counts, strict=True) if cell[1] == source))
            for _, source in self._cells
        }
        self._cached_block: tuple[int, list[tuple[int, int]]] = (-1, [])

    def draw(self, number: int) -> Draw:
        """Returns the sample with a global number, counted from 0."""
        block, offset = divmod(number, BLOCK)
        cell, rank = self._block(block)[offset]
        objective, source = self._cells[cell]
        position = block * self._rows_per_block[source] + rank
        # From the sample's number, not from the row: a row is corrupted differently in each epoch.
        seed = _mix(_mix(self._seed) ^ number)
        return Draw(objective, source, position, self.row(source, position), seed)

    def row(self, source: str, position: int) -> int:
        """Returns the row at a position of a source, counted through all epochs."""
        size = self._sizes[source]
        epoch, index = divmod(position, size)
        return permuted(index, size, _epoch_key(self._seed, source, epoch))

    def _block(self, block: int) -> list[tuple[int, int]]:
        """Returns for every sample of a block: (index of its pair, rank among the samples of its source)."""
        # Consecutive samples lie in the same block, so caching the last block suffices.
        if self._cached_block[0] != block:
            counts = dict.fromkeys(self._rows_per_block, 0)
            order = []
            for cell in np.random.default_rng([self._seed, block]).permutation(self._slots).tolist():
                source = self._cells[cell][1]
                order.append((cell, counts[source]))
                counts[source] += 1
            self._cached_block = (block, order)
        return self._cached_block[1]


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
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


def _apportion(weights: np.ndarray) -> np.ndarray:
    """Returns counts that are proportional to the weights and sum to BLOCK; each is at least 1.

    Rounding is by the largest remainder.
    """
    if len(weights) > BLOCK:
        raise UserError(f"{len(weights)} pairs of objective and source are more than the {BLOCK} samples of a block")
    # One sample per pair is set aside; the others are distributed by weight.
    spare = BLOCK - len(weights)
    quota = np.maximum(weights / weights.sum() * BLOCK - 1, 0)
    quota *= spare / quota.sum() if quota.sum() else 0
    counts = np.floor(quota).astype(np.int64)
    order = np.argsort(counts - quota, kind="stable")
    counts[order[: spare - counts.sum()]] += 1
    return counts + 1


def _mix(value: int) -> int:
    """The finaliser of splitmix64, which maps 64 bits to 64 well mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix(_mix(key) + number) for number in range(_FEISTEL_ROUNDS))


@functools.lru_cache(maxsize=256)
def _epoch_key(seed: int, source: str, epoch: int) -> int:
    # Not Python's hash(), which differs between processes.
    return int.from_bytes(hashlib.blake2b(f"{seed}/{source}/{epoch}".encode(), digest_size=8).digest(), "big")
