"""The layout of a chunk's values in one block of memory: weights, remainders, gradients and optimizer states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from offload.memory.chunks import Chunk, Stack, cut
from offload.optimizer.master_weights import remainder_dtype
from offload.optimizer.settings import OptimizerSettings

NextWeights = Literal["gradient", "copy"]
"""Where an update puts the new weights while the old ones are still read: in the memory of the gradient that it has
used, or in a copy of their own."""
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
        settings: the optimizer, which decides the other planes.
        next_weights: where updates put new weights; None: they replace the old ones.

    Attributes:
        planes: ``weight``, ``remainder``, ``gradient``, ``next_weight`` and the optimizer's states by name.
        num_bytes: the size of the block.
        state_names: the names of the optimizer's states.

    Raises:
        ValueError: gradients are of another type than the weights that are to take their place.
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
    next_weights: NextWeights | None = None,
) -> list[tuple[Chunk, ChunkLayout]]:
    """Cuts stacks into chunks and returns each with its layout; for the arguments see ``cut`` and ``ChunkLayout``."""
    chunks = cut(stacks, chunk_bytes, dtype)
    return [(chunk, ChunkLayout(chunk, dtype, gradient_dtype, settings, next_weights)) for chunk in chunks]


class Viewable(Protocol):
    """Memory that tensors can view: a block of host memory or a buffer of the device."""

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
