"""Reusable host memory for activations, allocated and freed in stack order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from offload.memory.layout import Viewable

_ALIGNMENT = 512  # bytes: the alignment of device memory; copies are fastest with it


class Block(Viewable, Protocol):
    """A block of host memory; see ``HostBlock``."""

    def free(self) -> None:
        """Frees the memory."""


class Slab:
    """A block, divided into pieces from its start; it is reused when all pieces have been returned."""

    def __init__(self, block: Block, num_bytes: int) -> None:
        self.block, self.num_bytes = block, num_bytes
        self.used_bytes = self.num_pieces = 0


class Arena:
    """Gives out pieces of slabs of host memory. Slabs are kept for reuse, because pinning a block is slow.

    Args:
        new_block: makes a block of the given size.
        slab_bytes: the size of slabs; a larger piece gets a slab of its own size.

    Attributes:
        num_bytes: the size of all slabs.
    """

    def __init__(self, new_block: Callable[[int], Block], slab_bytes: int) -> None:
        self._new_block, self._slab_bytes = new_block, slab_bytes
        self._slabs: list[Slab] = []
        self._closed = False
        self.num_bytes = 0

    def take(self, num_bytes: int) -> tuple[Slab, int]:
        """Returns a piece of ``num_bytes`` bytes, as its slab and its offset there."""
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        fitting = (slab for slab in self._slabs if slab.used_bytes + num_bytes <= slab.num_bytes)
        slab = next(fitting, None)
        if slab is None:
            size = max(num_bytes, self._slab_bytes)
            slab = Slab(self._new_block(size), size)
            self._slabs.append(slab)
            self.num_bytes += size
        offset = slab.used_bytes
        slab.used_bytes += num_bytes
        slab.num_pieces += 1
        return slab, offset

    def give(self, slab: Slab) -> None:
        """Returns a piece of this slab to the arena."""
        slab.num_pieces -= 1
        if slab.num_pieces == 0:
            slab.used_bytes = 0
            if self._closed:
                slab.block.free()

    def close(self) -> None:
        """Frees all slabs. A slab with pieces in use is freed when the last of them is returned."""
        self._closed = True
        for slab in self._slabs:
            if slab.num_pieces == 0:
                slab.block.free()
