"""Chunks, the units of moves, and the layout of a chunk's values in one block of memory.

A chunk is consecutive experts of one layer. Its values are weights, remainders, gradients and optimizer states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from offload.optimizer.master_weights import remainder_dtype
from offload.optimizer.settings import OptimizerSettings


@dataclass(frozen=True)
class Stack:
    """The shapes of the matrices and vectors of a layer's experts.

    Attributes:
        name: the layer's name.
        num_experts: the number of experts on this rank.
        matrices: parameter name -> (rows, columns) of one expert's matrix, or (numel,) of its vector.
        parts: parameter name -> the number of matrices, one below the other, in an expert's matrix; absent: one. Muon
            updates each by itself.
    """

    name: str
    num_experts: int
    matrices: dict[str, tuple[int, ...]]
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def expert_size(self) -> int:
        """The number of parameters of one expert."""
        return sum(math.prod(shape) for shape in self.matrices.values())


@dataclass(frozen=True)
class Chunk:
    """Consecutive experts of a stack.

    Attributes:
        number: the chunk's index among all chunks.
        stack: its stack.
        first_expert: the index of its first expert in the stack.
        num_experts: how many experts it has.
    """

    number: int
    stack: Stack
    first_expert: int
    num_experts: int

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return self.num_experts * self.stack.expert_size

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape [N, ...] of each stacked parameter."""
        return tuple((self.num_experts, *shape) for shape in self.stack.matrices.values())


def cut(stacks: Sequence[Stack], chunk_bytes: int, dtype: torch.dtype) -> list[Chunk]:
    """Cuts every stack into chunks of at most ``chunk_bytes`` bytes of weights, as equal in size as possible.

    Experts are not split: an expert larger than ``chunk_bytes`` is a chunk by itself.

    Args:
        dtype: the type of the weights.
    """
    chunks: list[Chunk] = []
    for stack in stacks:
        experts_per_chunk = max(1, chunk_bytes // (stack.expert_size * dtype.itemsize))
        num_chunks = -(-stack.num_experts // experts_per_chunk)
        bounds = [stack.num_experts * index // num_chunks for index in range(num_chunks + 1)]
        for first, end in itertools.pairwise(bounds):
            chunks.append(Chunk(len(chunks), stack, first, end - first))
    return chunks


NextWeights = Literal["gradient", "copy"]
"""Where an update puts the new weights while the old ones are still read: in the memory of the used gradient, or in a
separate copy."""

_ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load


@dataclass(frozen=True)
class Plane:
    """One kind of value of a chunk, such as its weights: the tensors [N, ...] of all parameters, one after the other.

    Attributes:
        dtype: the values' type.
        shapes: the shape of each parameter's tensor.
        offset_bytes: where the first tensor begins in the chunk's block.
    """

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    offset_bytes: int

    @property
    def numel(self) -> int:
        """The number of values."""
        return sum(math.prod(shape) for shape in self.shapes)


class ChunkLayout:
    """Where the planes of a chunk are in its block of memory.

    Args:
        chunk: the chunk.
        dtype: the type of the weights.
        gradient_dtype: the type of the gradients; None: gradients have no plane.
        settings: the optimizer; it decides the other planes.
        next_weights: where updates put new weights; None: they replace the old ones.

    Attributes:
        planes: ``weight``, ``remainder``, ``gradient``, ``next_weight`` and the optimizer's states by name.
        num_bytes: the size of the block.
        state_names: the names of the optimizer's states.

    Raises:
        ValueError: new weights are to use the memory of gradients, but have another type.
    """

    def __init__(
        self,
        chunk: Chunk,
        dtype: torch.dtype,
        gradient_dtype: torch.dtype | None,
        settings: OptimizerSettings,
        next_weights: NextWeights | None = None,
    ) -> None:
        self.planes: dict[str, Plane] = {}
        self.num_bytes = 0
        self._add("weight", dtype, chunk.shapes)
        remainder = remainder_dtype(dtype, settings.masters)
        if remainder is not None:
            self._add("remainder", remainder, chunk.shapes)
        if gradient_dtype is not None:
            self._add("gradient", gradient_dtype, chunk.shapes)
        if next_weights == "copy":
            self._add("next_weight", dtype, chunk.shapes)
        elif next_weights == "gradient":
            if gradient_dtype != dtype:
                raise ValueError(f"weights of {dtype} cannot take the place of gradients of {gradient_dtype}")
            self.planes["next_weight"] = self.planes["gradient"]
        # Muon's states of matrices and vectors have different names.
        self.state_names = tuple(dict.fromkeys(name for shape in chunk.shapes for name in settings.states(shape)))
        for name in self.state_names:
            self._add(name, torch.float32, tuple(settings.state_shape(name, shape) for shape in chunk.shapes))

    def _add(self, name: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> None:
        plane = Plane(dtype, shapes, self.num_bytes)
        self.planes[name] = plane
        self.num_bytes += -(-plane.numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def lay_out(
    stacks: Sequence[Stack],
    chunk_bytes: int,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype | None,
    settings: OptimizerSettings,
    next_weights: NextWeights | None = None,
) -> list[tuple[Chunk, ChunkLayout]]:
    """Cuts stacks into chunks and returns each with its layout; for the arguments see ``cut`` and ``ChunkLayout``."""
    chunks = cut(stacks, chunk_bytes, dtype)
    return [(chunk, ChunkLayout(chunk, dtype, gradient_dtype, settings, next_weights)) for chunk in chunks]


class Viewable(Protocol):
    """Memory for views: a block of host memory or a buffer of the device."""

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor:
        """Returns a tensor over part of the memory."""


def plane_values(memory: Viewable, plane: Plane) -> Tensor:
    """Returns all values of a plane as one tensor [numel]."""
    return memory.view(plane.dtype, plane.offset_bytes, (plane.numel,))


def plane_tensors(memory: Viewable, plane: Plane, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """Yields the tensors of a plane, one for each parameter of the stack.

    Args:
        dtype: None: ``memory`` is the chunk's block. Otherwise ``memory`` contains only this plane, in this type.
    """
    offset = plane.offset_bytes if dtype is None else 0
    for shape in plane.shapes:
        yield memory.view(dtype or plane.dtype, offset, shape)
        offset += math.prod(shape) * (dtype or plane.dtype).itemsize


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
