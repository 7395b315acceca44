"""How many bytes of a chunk move, and what moving them needs on either side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.chunks import Chunk, Layout


@dataclass(frozen=True)
class ChunkBytes:
    """Sizes of a chunk.

    Attributes:
        weight: one upload.
        gradient: one download.
        owned: all that the device holds of a chunk that it owns.
    """

    weight: int
    gradient: int
    owned: int


def sizes_of(laid_out: Sequence[tuple[Chunk, Layout]]) -> list[ChunkBytes]:
    """Weights and gradients move in the same type."""
    moved = [(chunk.numel * layout.planes["weight"].dtype.itemsize, layout) for chunk, layout in laid_out]
    return [ChunkBytes(num_bytes, num_bytes, layout.num_bytes) for num_bytes, layout in moved]


def window_bytes(sizes: Sequence[ChunkBytes], prefetch_depth: int) -> int:
    """What streaming needs whatever is kept: the chunk in use, those on their way, and two gradients."""
    return (1 + prefetch_depth) * max(size.weight for size in sizes) + 2 * max(size.gradient for size in sizes)


def staging_bytes(sizes: Sequence[ChunkBytes]) -> int:
    """What the host needs beside chunks: two blocks in which gradients arrive."""
    return 2 * max(size.gradient for size in sizes)
