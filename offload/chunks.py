"""What is moved as one: consecutive experts of one layer, with all that belongs to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload.update import OptimizerSettings, rest_dtype

_ALIGNMENT = 64  # bytes: a cache line, and enough for every vector load


@dataclass(frozen=True)
class Stack:
    """The matrices and vectors of a layer's experts, stacked per parameter.

    Attributes:
        name: of the layer.
        num_experts: how many this rank holds.
        matrices: parameter name -> (rows, columns) of one expert's matrix, or (numel,) of its vector.
    """

    name: str
    num_experts: int
    matrices: dict[str, tuple[int, ...]]

    @property
    def expert_size(self) -> int:
        """Parameters of one expert."""
        return sum(math.prod(shape) for shape in self.matrices.values())


@dataclass(frozen=True)
class Plane:
    """One kind of value of a chunk: a tensor [N, ...] for each parameter, one behind the other."""

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    offset_bytes: int

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Chunk:
    """Experts ``first_expert`` to ``first_expert + num_experts`` of a stack."""

    number: int
    stack: Stack
    first_expert: int
    num_experts: int

    @property
    def numel(self) -> int:
        return self.num_experts * self.stack.expert_size

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple((self.num_experts, *shape) for shape in self.stack.matrices.values())


def cut(stacks: Sequence[Stack], chunk_bytes: int, dtype: torch.dtype) -> list[Chunk]:
    """Cuts every stack into chunks of at most ``chunk_bytes`` of weights, as equal as can be.

    An expert is never split: where one is larger than ``chunk_bytes``, it is a chunk by itself.
    """
    chunks: list[Chunk] = []
    for stack in stacks:
        experts_per_chunk = max(1, chunk_bytes // (stack.expert_size * dtype.itemsize))
        num_chunks = -(-stack.num_experts // experts_per_chunk)
        bounds = [stack.num_experts * index // num_chunks for index in range(num_chunks + 1)]
        for first, end in itertools.pairwise(bounds):
            chunks.append(Chunk(len(chunks), stack, first, end - first))
    return chunks


class Layout:
    """Where the planes of a chunk lie in its one block of memory: weight, rest, gradient, optimizer states.

    Args:
        gradient_dtype: None: gradients are not kept.

    Attributes:
        planes: by name; ``weight`` comes first.
        num_bytes: of the block.
    """

    def __init__(
        self, chunk: Chunk, dtype: torch.dtype, gradient_dtype: torch.dtype | None, settings: OptimizerSettings
    ) -> None:
        self.planes: dict[str, Plane] = {}
        self.num_bytes = 0
        self._add("weight", dtype, chunk.shapes)
        rest = rest_dtype(dtype, settings.split_master)
        if rest is not None:
            self._add("rest", rest, chunk.shapes)
        if gradient_dtype is not None:
            self._add("gradient", gradient_dtype, chunk.shapes)
        states = [settings.states(shape) for shape in chunk.shapes]
        for name in states[0]:
            self._add(name, torch.float32, tuple(state[name] for state in states))
        self.state_names = tuple(states[0])

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
) -> list[tuple[Chunk, Layout]]:
    """All chunks, and where their values lie; the arguments are those of ``cut`` and ``Layout``."""
    return [(chunk, Layout(chunk, dtype, gradient_dtype, settings)) for chunk in cut(stacks, chunk_bytes, dtype)]


class Memory(Protocol):
    """A block of host memory, or a buffer of the device."""

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor: ...


def flat(memory: Memory, plane: Plane) -> Tensor:
    """All values of a plane: [numel]."""
    return memory.view(plane.dtype, plane.offset_bytes, (plane.numel,))


def parts(memory: Memory, plane: Plane, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """The tensors of a plane, one per parameter of the stack.

    Args:
        dtype: that of the values, where ``memory`` holds this plane alone in another type.
    """
    offset = plane.offset_bytes if dtype is None else 0
    for shape in plane.shapes:
        yield memory.view(dtype or plane.dtype, offset, shape)
        offset += math.prod(shape) * (dtype or plane.dtype).itemsize
