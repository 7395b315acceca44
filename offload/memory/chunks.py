"""Chunks, the units that are moved: consecutive experts of one layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stack:
    """The shapes of the matrices and vectors of a layer's experts.

    Attributes:
        name: the layer's name.
        num_experts: the number of experts on this rank.
        matrices: parameter name -> (rows, columns) of one expert's matrix, or (numel,) of its vector.
    """

    name: str
    num_experts: int
    matrices: dict[str, tuple[int, ...]]

    @property
    def expert_size(self) -> int:
        """The number of parameters of one expert."""
        return sum(math.prod(shape) for shape in self.matrices.values())


@dataclass(frozen=True)
class Chunk:
    """Consecutive experts of a stack.

    Attributes:
        number: the chunk's index among all chunks.
        stack: the stack that it is part of.
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

    Experts are not split: an expert that is larger than ``chunk_bytes`` is a chunk by itself.

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
