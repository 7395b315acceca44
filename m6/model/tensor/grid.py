"""The grid of ranks of a tensor group, and the collectives along its axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

OwnGroup = Callable[[Sequence[Sequence[int]]], dist.ProcessGroup | None]
"""Makes process groups from lists of global ranks and returns this rank's group. All ranks call it alike."""


class Grid:
    """The ranks of a tensor group as points of a grid, in row-major order.

    Every rank of the world makes this object with the same tensor groups.

    Args:
        shape: ranks along each axis.
        groups: the global ranks of all tensor groups, each in the order of the grid.
        rank: the global one of this process.
        own_group: see ``OwnGroup``.

    Attributes:
        place: number of this rank in its tensor group.
        coordinates: of this rank.
        received: elements received by this rank so far, if all-gather, reduce-scatter and all-reduce are rings.
    """

    def __init__(self, shape: Sequence[int], groups: Sequence[Sequence[int]], rank: int, own_group: OwnGroup) -> None:
        self.shape, self.num_ranks = tuple(shape), math.prod(shape)
        self.received = 0
        self._all = own_group(groups)
        # The line of a single axis is the group of all.
        self._along = [
            own_group([line for ranks in groups for line in _lines(self.shape, axis, ranks)])
            for axis in range(len(self.shape))
        ]
        self.place = next(list(ranks).index(rank) for ranks in groups if rank in ranks)
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        self.coordinates = tuple(self.place // stride % size for stride, size in zip(strides, self.shape, strict=True))

    def gather(self, part: Tensor, axis: int | None = None, dim: int = 0) -> Tensor:
        """All-gathers parts [m, n] along an axis, or over all ranks, and concatenates them in ``dim``, 0 or 1."""
        group, ranks = self._of(axis)
        found = part.new_empty(ranks * part.shape[0], *part.shape[1:])
        dist.all_gather_single(found, part.contiguous(), group=group)
        self.received += (ranks - 1) * part.numel()
        return found if dim == 0 else found.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1)

    def scatter(self, partial: Tensor, axis: int, dim: int = 0) -> Tensor:
        """Reduce-scatters matrices along an axis; returns this rank's part of the sum in ``dim``, 0 or 1."""
        group, ranks = self._of(axis)
        # [m, n] -> [ranks, part of m, n] or [ranks, m, part of n].
        parts = partial.unflatten(dim, (ranks, -1))
        parts = (parts if dim == 0 else parts.transpose(0, 1)).contiguous()
        found = parts.new_empty(parts.shape[1:])
        dist.reduce_scatter_single(found, parts.flatten(0, 1), group=group)
        self.received += (ranks - 1) * found.numel()
        return found

    def sum(self, partial: Tensor, axis: int | None = None) -> Tensor:
        """All-reduces a tensor along an axis, or over all ranks; returns the sum."""
        group, ranks = self._of(axis)
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        self.received += 2 * (ranks - 1) * total.numel() // ranks
        return total

    def _of(self, axis: int | None) -> tuple[dist.ProcessGroup | None, int]:
        return (self._all, self.num_ranks) if axis is None else (self._along[axis], self.shape[axis])


def _lines(shape: tuple[int, ...], axis: int, ranks: Sequence[int]) -> list[list[int]]:
    """Groups of ranks with equal coordinates on all axes but ``axis``."""
    lines: list[list[int]] = torch.tensor(list(ranks)).view(shape).movedim(axis, -1).reshape(-1, shape[axis]).tolist()
    return lines
