"""The bytes of chunks, and of the buffers for moving them on the device and on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offload.memory.layout import Chunk, ChunkLayout


def in_mib(num_bytes: int) -> str:
    """A number of bytes for messages about budgets, rounded up: a budget of as many MiB suffices."""
    return f"{math.ceil(num_bytes / 2**20 * 10_000) / 10_000:.10g} MiB"


@dataclass(frozen=True)
class ChunkBytes:
    """The sizes of a chunk in bytes.

    Attributes:
        weight: its weights, so the size of an upload.
        gradient: its gradient, so the size of a download.
        owned: all of its values with gradients and optimizer state, wherever they are.
    """

    weight: int
    gradient: int
    owned: int


def sizes_of(laid_out: Sequence[tuple[Chunk, ChunkLayout]]) -> list[ChunkBytes]:
    """Returns the chunks' sizes; gradients are moved in the type of the weights."""
    moved = [(chunk.numel * layout.planes["weight"].dtype.itemsize, layout) for chunk, layout in laid_out]
    return [ChunkBytes(num_bytes, num_bytes, layout.num_bytes) for num_bytes, layout in moved]


def window_bytes(sizes: Sequence[ChunkBytes], prefetch_depth: int) -> int:
    """Returns the device memory of streaming: the chunk in use, prefetched chunks, and two gradients."""
    return (1 + prefetch_depth) * max(size.weight for size in sizes) + 2 * max(size.gradient for size in sizes)


def staging_bytes(sizes: Sequence[ChunkBytes]) -> int:
    """Returns the host memory in addition to chunks: two staging buffers for gradients."""
    return 2 * max(size.gradient for size in sizes)
