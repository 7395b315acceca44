"""Muon: each update is the momentum of a matrix made orthogonal.

The optimizer's tensors are parameters, or ZeRO's flat partitions of them. ``MatrixLayout`` says where matrices are in
them. A matrix of a tensor group has an unusual place. A rank has a shard of a parameter with one or several matrices.
Such a shard counts as one matrix here: ZeRO may cut it, and the function of the matrix gathers the other shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m6.model.placements import Shard
from m6.training.deepspeed_private import partitions
from m6.training.optimizers import MUON_BATCH_ELEMENTS
from offload.optimizer.orthogonal import orthogonal, update_scale


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for the matrices of blocks, AdamW for all other parameters.

    A gradient G moves the momentum B to mu B + (1 - mu) G. The update is approximately the orthogonal matrix nearest to
    mu B + (1 - mu) G, times 0.2 sqrt(max(rows, columns)). This factor gives it the root mean square of AdamW's updates,
    so both share learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982, section 2.2). Each matrix of a
    stack, such as an expert's, is updated separately.

    Attributes:
        layouts: the positions of matrices in each tensor of the parameter groups with a true value ``muon``. ZeRO
            replaces the parameters of a group by one flat partition; the layouts are then replaced, too.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        layouts: Mapping[Tensor, MatrixLayout],
        momentum: float,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """Makes the optimizer.

        Args:
            momentum: mu.
            dtype: of the matrix products of the orthogonalization.
            options: of AdamW; ``fused`` is True by default.
        """
        super().__init__(groups, **{"fused": True, **options})
        self.layouts = layouts
        self._momentum, self._dtype = momentum, dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a saved state. AdamW sees only its own groups, because it expects a step counter of each parameter."""
        groups = state["param_groups"]
        super().__setstate__(state | {"param_groups": [group for group in groups if not group.get("muon")]})
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters. Gradients of the groups with ``muon`` are overwritten."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("muon")]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            for parameter in group["params"] if group.get("muon") else ():
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        directions = gradient.lerp_(momentum, self._momentum).view(-1)
        weights = parameter.view(-1)
        weights.mul_(1 - lr * weight_decay)
        layout = self.layouts[parameter]
        for run in layout.whole:
            for start, end in run.batches(MUON_BATCH_ELEMENTS):
                update = run.kind.map(self._orthogonal, directions[start:end].to(layout.device))
                weights[start:end].sub_(update.to(weights.device), alpha=lr * update_scale(run.kind.shape))
        for cut, update in complete_cuts(layout, directions, self._orthogonal):
            weights[cut.local].sub_(update, alpha=lr * update_scale(cut.kind.shape))

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        # A shard may belong to more matrices than a batch has.
        at_once = max(1, MUON_BATCH_ELEMENTS // (matrices.shape[1] * matrices.shape[2]))
        batches = [orthogonal(batch, self._dtype) for batch in matrices.split(at_once)]
        return batches[0] if len(batches) == 1 else torch.cat(batches)


@dataclass(frozen=True)
class MatrixKind:
    """What is updated as a whole: a matrix, or a shard of a parameter.

    Attributes:
        shape: rows and columns of a matrix.
        shard: this rank's part of a parameter, which has one or several matrices of this shape; None: a whole matrix.
    """

    shape: tuple[int, int]
    shard: Shard | None = None

    @property
    def numel(self) -> int:
        """The number of elements on this rank, before ZeRO partitions them."""
        return self.shape[0] * self.shape[1] if self.shard is None else self.shard.numel

    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        """Applies a function to matrices. All ranks of the tensor group call it.

        Args:
            function: maps matrices [N, R, C] to the same shape.
            values: the elements of one or several matrices, or of this rank's shard.

        Returns:
            the elements of the results, or of this rank's shard of them.
        """
        if self.shard is None:
            return function(values.view(-1, *self.shape)).reshape(-1)
        whole = self.shard.whole(values)
        return self.shard.of(function(whole.view(-1, *self.shape)).reshape(whole.shape)).reshape(-1)


@dataclass(frozen=True)
class MuonShard:
    """Consecutive matrices of the same kind.

    Attributes:
        start: the first element of the first matrix in the flat tensor.
        count: the number of matrices.
        kind: of all of them.
    """

    start: int
    count: int
    kind: MatrixKind

    @classmethod
    def of(cls, parameter: Tensor, start: int, stack: tuple[int, int, int]) -> MuonShard:
        """Returns the matrices of a parameter.

        Args:
            start: see ``MuonShard``.
            stack: number, rows and columns of the matrices, see ``matrices_of_blocks``.
        """
        shard: Shard | None = getattr(parameter, "shard", None)
        return cls(start, stack[0] if shard is None else 1, MatrixKind(stack[1:], shard))

    def batches(self, elements: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of whole matrices, each with at most ``elements`` elements or a single matrix."""
        numel = self.kind.numel
        step = max(1, elements // numel) * numel
        end = self.start + self.count * numel
        for start in range(self.start, end, step):
            yield start, min(start + step, end)


@dataclass(frozen=True)
class SplitMatrix:
    """A matrix split over the partitions of several ranks.

    Attributes:
        kind: of the matrix.
        parts: rank -> range of its elements in the matrix. The first rank is the owner: it gathers the matrix.
        local: range of this rank's elements in its flat tensor.
    """

    kind: MatrixKind
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
        group: the ranks with the other parts; ``SplitMatrix`` numbers ranks in this group.
    """

    whole: Sequence[MuonShard]
    device: torch.device
    cuts: Sequence[SplitMatrix] = ()
    group: dist.ProcessGroup | None = field(default=None, repr=False)


def layout_of_partition(
    runs: Sequence[MuonShard], partition_size: int, rank: int
) -> tuple[list[MuonShard], list[SplitMatrix]]:
    """Returns the whole and the split matrices of one of several equal partitions of a flat tensor.

    Args:
        runs: the matrices of the flat tensor.
        partition_size: elements of a partition.
        rank: the number of the partition.
    """
    begin, end = rank * partition_size, (rank + 1) * partition_size
    whole: list[MuonShard] = []
    cuts: list[SplitMatrix] = []
    for run in runs:
        numel = run.kind.numel
        # The first matrix with its start in the partition, and the first matrix with its end behind it.
        first = max(0, -(-(begin - run.start) // numel))
        last = min(run.count, (end - run.start) // numel)
        if first < last:
            whole.append(MuonShard(run.start + first * numel - begin, last - first, run.kind))
        for number in sorted({first - 1, max(last, 0)}):
            start = run.start + number * numel
            is_cut = start < begin < start + numel or start < end < start + numel
            if 0 <= number < run.count and is_cut:
                cuts.append(_cut(start, run.kind, partition_size, rank))
    return whole, cuts


def _cut(start: int, kind: MatrixKind, partition_size: int, rank: int) -> SplitMatrix:
    end = start + kind.numel
    parts: dict[int, slice] = {}
    for number in range(start // partition_size, (end - 1) // partition_size + 1):
        low, high = max(start, number * partition_size), min(end, (number + 1) * partition_size)
        parts[number] = slice(low - start, high - start)
    offset = start - rank * partition_size
    return SplitMatrix(kind, parts, slice(parts[rank].start + offset, parts[rank].stop + offset))


def layouts_in_zero(zero: Any, shapes: Mapping[Tensor, tuple[int, int, int]]) -> dict[Tensor, MatrixLayout]:
    """Finds the matrices in the flat partitions of DeepSpeed's optimizer for ZeRO stages 1 and 2.

    Args:
        shapes: see ``matrices_of_blocks``.
    """
    layouts: dict[Tensor, MatrixLayout] = {}
    for flat, parameters, offsets, _, group in partitions(zero):
        runs = [
            MuonShard.of(parameter, offset, shapes[parameter])
            for parameter, offset in zip(parameters, offsets, strict=True)
            if parameter in shapes
        ]
        if runs:
            whole, cuts = layout_of_partition(runs, flat.numel(), dist.get_rank(group))
            layouts[flat] = MatrixLayout(whole, parameters[0].device, cuts, group)
    return layouts


def complete_cuts(
    layout: MatrixLayout, values: Tensor, function: Callable[[Tensor], Tensor]
) -> Iterator[tuple[SplitMatrix, Tensor]]:
    """Applies a function to the split matrices of a tensor. All ranks of the group call it.

    The owner of each matrix gathers the parts of the other ranks, and sends them their parts of the result.

    Args:
        values: the flat tensor of this rank.
        function: see ``MatrixKind.map``; on the device of ``layout``.

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
            matrices[index] = values.new_empty(cut.kind.numel, device=device)
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
            result = cut.kind.map(function, matrices[index])
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
