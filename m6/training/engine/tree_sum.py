"""Sums of micro-batch gradients along the tree of ``m6.config.sum_tree``, on any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from m6.config.sum_tree import Branch, TreeShape, halves
from m6.training.reduction.buckets import buckets


class BranchSum:
    """Adds the leaves of one rank in order. It holds one partial sum for each incomplete branch.

    Args:
        shape: of the tree.
        group: the expert-parallel group of the rank.
    """

    def __init__(self, shape: TreeShape, group: int) -> None:
        self.shape, self._group = shape, group
        self._next, _ = shape.part(group)
        self._partial: list[list[Tensor]] = []

    def add(self, leaf: list[Tensor]) -> None:
        """Adds a leaf, and takes ownership of its tensors."""
        self._partial.append(leaf)
        for _ in range(self.shape.joins(self._group, self._next)):
            right = self._partial.pop()
            torch._foreach_add_(self._partial[-1], right)
        self._next += 1

    def finish(self) -> list[list[Tensor]]:
        """Returns the sums of the rank's branches in order."""
        _, end = self.shape.part(self._group)
        assert self._next == end, f"{end - self._next} leaves are missing"
        return self._partial


def sum_over_ranks(
    branches: Sequence[Sequence[Tensor]], shape: TreeShape, group: dist.ProcessGroup | None, device: torch.device
) -> list[Tensor]:
    """Sums tensors over the ranks of a group, in the order of the tree.

    An all-to-all gives each rank a chunk of all ranks' elements. The rank adds it up, and an all-gather collects the
    sums. This takes as many bytes as an all-reduce, and half as many again for each further branch of a rank. An
    all-reduce would not do: its order of additions depends on the number of ranks.

    Args:
        branches: of this rank, each with fp32 tensors of equal shapes on all ranks.
        shape: the tree, with the ranks of ``group`` in rows of ``group_size``. Each column is added along the tree,
            then the sums of the columns are added in order.
        group: None: all ranks.
        device: for the exchange of tensors in the group.

    Returns:
        tensors of the same shapes, on the devices of ``branches``.
    """
    if shape.ranks == 1:
        return list(branches[0])
    held = [len(of_group) for of_group in shape.branches for _ in range(shape.group_size)]
    found: list[Tensor] = []
    for bucket in zip(*map(buckets, branches), strict=True):
        flat = torch.stack([torch.cat([each.reshape(-1).to(device) for each in tensors]) for tensors in bucket])
        numel = flat.shape[1]
        padded = torch.nn.functional.pad(flat, (0, -numel % shape.ranks))
        chunk = padded.shape[1] // shape.ranks
        sent = padded.view(len(bucket), shape.ranks, chunk).transpose(0, 1).contiguous()
        received = sent.new_empty(sum(held), chunk)
        dist.all_to_all_single(received, sent.view(-1, chunk), held, [len(bucket)] * shape.ranks, group=group)
        whole = sent.new_empty(shape.ranks, chunk)
        dist.all_gather(list(whole.unbind()), _tree(received, shape), group=group)
        sums = whole.view(-1)[:numel].split([tensor.numel() for tensor in bucket[0]])
        found += [total.view_as(tensor).to(tensor.device) for total, tensor in zip(sums, bucket[0], strict=True)]
    return found


def _tree(sums: Tensor, shape: TreeShape) -> Tensor:
    """Sums [branches of all ranks, n] to [n]: each column along the tree, then the columns in order."""
    rows = iter(sums)
    columns: list[dict[Branch, Tensor]] = [{} for _ in range(shape.group_size)]
    for branches, column in itertools.product(shape.branches, columns):
        column.update(zip(branches, itertools.islice(rows, len(branches)), strict=True))
    total: Tensor | None = None
    for column in columns:
        of_column = _total(column, (0, shape.leaves))
        total = of_column if total is None else total.add_(of_column)
    assert total is not None
    return total


def _total(sums: dict[Branch, Tensor], branch: Branch) -> Tensor:
    """Returns the sum of a branch from the sums of its inner branches. It overwrites one of them."""
    if branch in sums:
        return sums[branch]
    left, right = halves(branch)
    return _total(sums, left).add_(_total(sums, right))
