"""Placements of matmuls over the ranks of a tensor group, in one, two or three dimensions.

A placement of the matmuls Y = X A of a feed-forward over a grid of ranks is a table for X, A and Y of each of the two
matmuls. It names the grid axes for their rows and columns, and the axes of their collectives. One autograd function
runs all placements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m6.architecture.communication_volume import AXES, PlacementName, side

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
        self.coordinates = self.coordinates_of(self.place)

    def coordinates_of(self, place: int) -> tuple[int, ...]:
        """Returns the coordinates of the rank with this number in its tensor group."""
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return tuple(place // stride % size for stride, size in zip(strides, self.shape, strict=True))

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


@dataclass(frozen=True)
class Division:
    """The sharding of a matrix over a grid of ranks. It is replicated along all other axes.

    Attributes:
        rows, columns: the axes that shard them, the axis with the longest blocks first.
        gathered: the axis of the all-gather before a matmul, the last one of rows or columns. The reverse is a
            reduce-scatter of partial sums along this axis.
        summed: the axis of an all-reduce: inputs are replicated along it, and results are partial sums.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    gathered: int | None = None
    summed: int | None = None

    def part(self, whole: Tensor, grid: Grid, place: int | None = None) -> Tensor:
        """A rank's part of a matrix [..., M, N], as a view; ``place``: its number in the group, None: this rank."""
        coordinates = grid.coordinates if place is None else grid.coordinates_of(place)
        for dim, axes in ((-2, self.rows), (-1, self.columns)):
            for axis in axes:
                whole = whole.unflatten(dim, (grid.shape[axis], -1)).select(dim - 1, coordinates[axis])
        return whole

    def whole(self, part: Tensor, grid: Grid) -> Tensor:
        """The matrix [M, N] from the parts [m, n] of all ranks; it must be sharded along all axes of the grid."""
        parts = grid.gather(part).view(*grid.shape, *part.shape)
        axes = len(grid.shape)
        ordered = parts.permute(*self.rows, axes, *self.columns, axes + 1)
        return ordered.flatten(len(self.rows) + 1).flatten(0, len(self.rows))

    def all_gather(self, part: Tensor, grid: Grid) -> Tensor:
        """All-gathers the part for a matmul of this rank, if the sharding needs it."""
        return part if self.gathered is None else grid.gather(part, self.gathered, self._dim)

    def reduce_scatter(self, partial: Tensor, grid: Grid) -> Tensor:
        """This rank's part of the sum of all ranks' partial results; the reverse of ``all_gather``."""
        if self.gathered is not None:
            return grid.scatter(partial, self.gathered, self._dim)
        return partial if self.summed is None else grid.sum(partial, self.summed)

    @property
    def _dim(self) -> int:
        return 0 if self.gathered in self.rows else 1


@dataclass(frozen=True)
class ProductPlacement:
    """The sharding of X, A and Y of a matmul Y = X A."""

    inputs: Division
    matrix: Division
    outputs: Division

    def __call__(self, inputs: Tensor, matrix: Tensor, grid: Grid) -> Tensor:
        """This rank's part of Y from its parts of X and A. Only these parts are kept for the backward pass."""
        if torch.is_autocast_enabled(inputs.device.type):
            dtype = torch.get_autocast_dtype(inputs.device.type)
            inputs, matrix = inputs.to(dtype), matrix.to(dtype)
        found: Tensor = _Product.apply(inputs, matrix, self, grid)
        return found


@dataclass(frozen=True)
class Placement:
    """The sharding of a pair of matmuls. The second one reads the result of the first one.

    Attributes:
        name: of the placement, see ``m6/architecture/communication_volume.py``.
        first, second: the matmuls.
    """

    name: PlacementName
    first: ProductPlacement
    second: ProductPlacement

    def grid(self, groups: Sequence[Sequence[int]], rank: int, own_group: OwnGroup) -> Grid:
        """The grid of this rank, see ``Grid``."""
        q = side(self.name, len(groups[0]))
        assert q is not None
        return Grid((q,) * AXES[self.name], groups, rank, own_group)


# Axis 0 is the only one. In Megatron-LM (arXiv 1909.08053, section 3), f is the all-reduce of the first input's
# gradient and g the all-reduce of the second output.
ONE = Placement(
    "1d",
    ProductPlacement(Division(summed=0), Division(columns=(0,)), Division(columns=(0,))),
    ProductPlacement(Division(columns=(0,)), Division(rows=(0,)), Division(summed=0)),
)
# With divided tokens g is the reduce-scatter of the output, and f the all-gather of the input, of which only parts are
# kept.
OF_TOKENS = Placement(
    "1d",
    ProductPlacement(Division((0,), gathered=0), Division(columns=(0,)), Division(columns=(0,))),
    ProductPlacement(Division(columns=(0,)), Division(rows=(0,)), Division((0,), gathered=0)),
)
# Axis 0 shards rows, axis 1 columns. All blocks of a SUMMA matmul (Optimus, arXiv 2104.05343) are gathered at once.
_SUMMA = ProductPlacement(Division((0,), (1,), gathered=1), Division((0,), (1,), gathered=0), Division((0,), (1,)))


def _cube(j: int, l: int) -> ProductPlacement:  # noqa: E741, the paper's name
    # arXiv 2105.14450, section 3: gather X over j and A over i, multiply, and sum up Y over l.
    return ProductPlacement(
        Division((0, j), (l,), gathered=j), Division((l, 0), (j,), gathered=0), Division((0, l), (j,), gathered=l)
    )


BY_NAME: dict[PlacementName, Placement] = {
    "1d": ONE,
    "2d": Placement("2d", _SUMMA, _SUMMA),
    "3d": Placement("3d", _cube(1, 2), _cube(2, 1)),  # the next layer swaps the directions j and l
}


@dataclass(frozen=True)
class Shard:
    """The part of a parameter on this rank. The ranks of the tensor group have all its elements, each one once.

    Attributes:
        shape: of the whole parameter.
        grid: of the tensor group.
        of_place: maps the whole parameter to the part of the rank with this number in the group, a view.
    """

    shape: tuple[int, ...]
    grid: Grid
    of_place: Callable[[Tensor, int], Tensor]

    @property
    def numel(self) -> int:
        """The number of elements of this rank's part."""
        return self.of(torch.empty(self.shape, device="meta")).numel()

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter, a view."""
        return self.of_place(whole, self.grid.place)

    def whole(self, part: Tensor) -> Tensor:
        """All-gathers the parts, each with the elements of ``of`` in order, to the whole parameter.

        All parts must have the same number of elements.
        """
        whole = part.new_empty(self.shape)
        for place, found in enumerate(self.grid.gather(part.reshape(1, -1))):
            view = self.of_place(whole, place)
            view.copy_(found.view_as(view))
        return whole


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, matrix: Tensor, product: ProductPlacement, grid: Grid) -> Tensor:
        ctx.save_for_backward(inputs, matrix)
        ctx.product, ctx.grid = product, grid
        brought = product.inputs.all_gather(inputs, grid), product.matrix.all_gather(matrix, grid)
        return product.outputs.reduce_scatter(brought[0] @ brought[1], grid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (inputs, matrix), product, grid = ctx.saved_tensors, ctx.product, ctx.grid
        grad = product.outputs.all_gather(grads[0], grid)
        by_inputs = product.inputs.reduce_scatter(grad @ product.matrix.all_gather(matrix, grid).t(), grid)
        by_matrix = product.matrix.reduce_scatter(product.inputs.all_gather(inputs, grid).t() @ grad, grid)
        return by_inputs, by_matrix, None, None
