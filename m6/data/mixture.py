"""Which row is read for which objective: a pure function of the sample's number, with no state to save.

Samples are numbered globally. Every BLOCK consecutive numbers hold the same count of each (objective, source) pair,
in an order shuffled per block; every epoch of a source is a permutation of all of its rows. So a run resumes, or
changes its number of ranks and workers, by knowing a number alone.
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
    """One sample: ``row`` of ``source`` for ``objective``; ``position`` numbers the source's rows through all epochs,
    and ``seed`` is for the objective's random choices."""

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
        seed: of the run.

    Raises:
        UserError: when there are more pairs than a block holds.
    """

    def __init__(self, weights: Mapping[tuple[str, str], float], sizes: Mapping[str, int], seed: int) -> None:
        self._cells = sorted(weights)
        self._sizes = dict(sizes)
        self._seed = seed
        counts = _apportion(np.array([weights[cell] for cell in self._cells], np.float64))
        self._slots = np.repeat(np.arange(len(self._cells)), counts)
        self._rows_per_block = {
            source: int(sum(count for cell, count in zip(self._cells, counts, strict=True) if cell[1] == source))
            for _, source in self._cells
        }
        self._cached_block: tuple[int, list[tuple[int, int]]] = (-1, [])

    def draw(self, number: int) -> Draw:
        """The sample of a global number, from 0."""
        block, offset = divmod(number, BLOCK)
        cell, rank = self._block(block)[offset]
        objective, source = self._cells[cell]
        position = block * self._rows_per_block[source] + rank
        seed = _mix(_mix(self._seed) ^ number)
        return Draw(objective, source, position, self.row(source, position), seed)

    def row(self, source: str, position: int) -> int:
        """The row at a position of the source's endless sequence of epochs."""
        size = self._sizes[source]
        epoch, index = divmod(position, size)
        return permuted(index, size, _epoch_key(self._seed, source, epoch))

    def _block(self, block: int) -> list[tuple[int, int]]:
        """(pair, rank among the block's samples of the pair's source) for every sample of a block."""
        if self._cached_block[0] != block:
            seen = dict.fromkeys(self._rows_per_block, 0)
            order = []
            for cell in np.random.default_rng([self._seed, block]).permutation(self._slots).tolist():
                source = self._cells[cell][1]
                order.append((cell, seen[source]))
                seen[source] += 1
            self._cached_block = (block, order)
        return self._cached_block[1]


def permuted(index: int, size: int, key: int) -> int:
    """The place of ``index`` in a permutation of ``range(size)`` that ``key`` chooses, in constant memory.

    A Feistel network permutes the next even power of two; indices that leave the range walk on until they return.
    """
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
    """Counts that sum to BLOCK: largest remainders, and at least one for every weight."""
    if len(weights) > BLOCK:
        raise UserError(f"{len(weights)} pairs of objective and source are more than the {BLOCK} samples of a block")
    spare = BLOCK - len(weights)
    quota = np.maximum(weights / weights.sum() * BLOCK - 1, 0)
    quota *= spare / quota.sum() if quota.sum() else 0
    counts = np.floor(quota).astype(np.int64)
    order = np.argsort(counts - quota, kind="stable")
    counts[order[: spare - counts.sum()]] += 1
    return counts + 1


def _mix(value: int) -> int:
    """The splitmix64 finaliser: 64 bits in, 64 well mixed bits out."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


@functools.lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix(_mix(key) + number) for number in range(_FEISTEL_ROUNDS))


@functools.lru_cache(maxsize=256)
def _epoch_key(seed: int, source: str, epoch: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{source}/{epoch}".encode(), digest_size=8).digest(), "big")
