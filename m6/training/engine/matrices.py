"""The positions of matrices in the optimizer's tensors: in parameters, or in ZeRO's flat partitions of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive matrices of the same shape.

    Attributes:
        start: the first element of the first matrix in the flat tensor.
        count: the number of matrices.
        shape: rows and columns of a matrix.
    """

    start: int
    count: int
    shape: tuple[int, int]

    def batches(self, elements: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of whole matrices, each with at most ``elements`` elements or a single matrix."""
        numel = self.shape[0] * self.shape[1]
        step = max(1, elements // numel) * numel
        end = self.start + self.count * numel
        for start in range(self.start, end, step):
            yield start, min(start + step, end)


@dataclass(frozen=True)
class Cut:
    """A matrix split over the partitions of several ranks.

    Attributes:
        shape: rows and columns.
        parts: rank -> range of its elements in the matrix. The first rank is the owner: it gathers the matrix.
        local: range of this rank's elements in its flat tensor.
    """

    shape: tuple[int, int]
    parts: dict[int, slice]
    local: slice

    @property
    def owner(self) -> int:
        """The rank that gathers the matrix."""
        return next(iter(self.parts))


@dataclass(frozen=True)
class MatrixLayout:
    """The matrices in a tensor.

    Attributes:
        whole: complete matrices in the tensor.
        device: the device of matrix products.
        cuts: split matrices with a part in the tensor, in order.
        group: the ranks with the other parts; ``Cut`` numbers ranks in this group.
    """

    whole: Sequence[Run]
    device: torch.device
    cuts: Sequence[Cut] = ()
    group: dist.ProcessGroup | None = field(default=None, repr=False)


def layout_of_partition(runs: Sequence[Run], partition_size: int, rank: int) -> tuple[list[Run], list[Cut]]:
    """Returns the whole and the split matrices of one of several equal partitions of a flat tensor.

    Args:
        runs: the matrices of the flat tensor.
        partition_size: elements of a partition.
        rank: the number of the partition.
    """
    begin, end = rank * partition_size, (rank + 1) * partition_size
    whole: list[Run] = []
    cuts: list[Cut] = []
    for run in runs:
        numel = run.shape[0] * run.shape[1]
        # The first matrix with its start in the partition, and the first matrix with its end behind it.
        first = max(0, -(-(begin - run.start) // numel))
        last = min(run.count, (end - run.start) // numel)
        if first < last:
            whole.append(Run(run.start + first * numel - begin, last - first, run.shape))
        for number in sorted({first - 1, max(last, 0)}):
            start = run.start + number * numel
            is_cut = start < begin < start + numel or start < end < start + numel
            if 0 <= number < run.count and is_cut:
                cuts.append(_cut(start, run.shape, partition_size, rank))
    return whole, cuts


def _cut(start: int, shape: tuple[int, int], partition_size: int, rank: int) -> Cut:
    end = start + shape[0] * shape[1]
    parts: dict[int, slice] = {}
    for number in range(start // partition_size, (end - 1) // partition_size + 1):
        low, high = max(start, number * partition_size), min(end, (number + 1) * partition_size)
        parts[number] = slice(low - start, high - start)
    offset = start - rank * partition_size
    return Cut(shape, parts, slice(parts[rank].start + offset, parts[rank].stop + offset))


def layouts_in_zero(zero: Any, shapes: Mapping[Tensor, tuple[int, int, int]]) -> dict[Tensor, MatrixLayout]:
    """Finds the matrices in the flat partitions of DeepSpeed 0.19.8's optimizer for ZeRO stages 1 and 2.

    Args:
        shapes: for each parameter the number of its matrices, and the rows and columns of one.
    """
    layouts: dict[Tensor, MatrixLayout] = {}
    for index, flat in enumerate(zero.single_partition_of_fp32_groups):
        parameters, offsets = zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index]
        group = zero.real_dp_process_group[index]
        runs = [
            Run(offset, shapes[parameter][0], shapes[parameter][1:])
            for parameter, offset in zip(parameters, offsets, strict=True)
            if parameter in shapes
        ]
        if runs:
            whole, cuts = layout_of_partition(runs, flat.numel(), dist.get_rank(group))
            layouts[flat] = MatrixLayout(whole, parameters[0].device, cuts, group)
    return layouts


def complete_cuts(
    layout: MatrixLayout, values: Tensor, function: Callable[[Tensor, torch.device], Tensor]
) -> Iterator[tuple[Cut, Tensor]]:
    """Applies a function to the split matrices of a tensor. All ranks of the group call it.

    The owner of each matrix gathers the parts of the other ranks, and sends them their parts of the result.

    Args:
        values: the flat tensor of this rank.
        function: maps matrices [1, R, C] to the same shape, on a device.

    Yields:
        each matrix, and this rank's elements of the result.
    """
    group, device = layout.group, layout.device
    rank = dist.get_rank(group) if layout.cuts else 0
    # One message for each matrix and each rank except the owner.
    matrices: dict[int, Tensor] = {}
    messages: list[dist.P2POp] = []
    for index, cut in enumerate(layout.cuts):
        mine = values[cut.local].to(device)
        if cut.owner == rank:
            matrices[index] = values.new_empty(cut.shape[0] * cut.shape[1], device=device)
            matrices[index][cut.parts[rank]] = mine
            messages += [
                _receive(matrices[index][part], peer, group) for peer, part in cut.parts.items() if peer != rank
            ]
        else:
            messages.append(_send(mine, cut.owner, group))
    _exchange(messages)
    results: list[Tensor] = []
    messages = []
    for index, cut in enumerate(layout.cuts):
        if cut.owner == rank:
            result = function(matrices[index].view(1, *cut.shape), device).reshape(-1)
            messages += [_send(result[part], peer, group) for peer, part in cut.parts.items() if peer != rank]
            results.append(result[cut.parts[rank]])
        else:
            results.append(torch.empty_like(values[cut.local], device=device))
            messages.append(_receive(results[-1], cut.owner, group))
    _exchange(messages)
    for cut, result in zip(layout.cuts, results, strict=True):
        yield cut, result.to(values.device)


def _send(tensor: Tensor, rank: int, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.isend, tensor, group=group, group_peer=rank)


def _receive(tensor: Tensor, rank: int, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank)


def _exchange(messages: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(messages) if messages else ():
        request.wait()
