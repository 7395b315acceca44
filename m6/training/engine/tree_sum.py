"""Sums over micro-batches in an order that does not depend on the number of ranks.

The leaves are the micro-steps of a global batch: a micro-step is one micro-batch of each rank of an expert-parallel
group. They are o x 2^k in number, with o odd. Each run of o neighbours is added in order, the 2^k results pairwise. A
rank has a contiguous part of the leaves, so that it adds up a whole branch of the tree if the expert-parallel groups
are 2^j in number with j <= k. The virtual workers of EasyScale (arXiv 2208.14228) are these leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_ELEMENTS = 1 << 23
"""Elements that are exchanged at once."""


@dataclass(frozen=True)
class TreeShape:
    """Where a rank stands in the tree.

    Attributes:
        leaves: micro-steps of a global batch.
        groups: expert-parallel groups.
        group_size: ranks of one.
    """

    leaves: int
    groups: int
    group_size: int

    @property
    def run(self) -> int:
        """o: neighbours that are added in order."""
        return self.leaves // (self.leaves & -self.leaves)


class BranchSum:
    """Adds up the leaves of one rank, in their order; holds one partial sum for each level of the branch.

    Args:
        run: see ``TreeShape.run``.
    """

    def __init__(self, run: int) -> None:
        self._run = run
        self._leaves = 0
        # Partial sums with the number of runs in them: 4, 2, 1 after 7 runs. The last one may be incomplete.
        self._partial: list[tuple[int, list[Tensor]]] = []

    def add(self, leaf: list[Tensor]) -> None:
        """Adds a leaf, whose tensors belong to this object afterwards."""
        if self._leaves % self._run:
            torch._foreach_add_(self._partial[-1][1], leaf)
        else:
            self._partial.append((1, leaf))
        self._leaves += 1
        if self._leaves % self._run == 0:
            while len(self._partial) > 1 and self._partial[-1][0] == self._partial[-2][0]:
                runs, right = self._partial.pop()
                _, left = self._partial.pop()
                torch._foreach_add_(left, right)
                self._partial.append((2 * runs, left))

    def finish(self) -> list[Tensor]:
        """The sum of the branch; the next leaf begins another one."""
        ((_, total),) = self._partial
        self._partial, self._leaves = [], 0
        return total


def sum_over_ranks(
    tensors: Sequence[Tensor], order: tuple[int, int], group: dist.ProcessGroup | None, device: torch.device
) -> list[Tensor]:
    """Adds tensors up over the ranks of a group, in the order of the tree.

    Each rank gets a part of every rank's elements, adds them up, and sends the sum to all. That takes as many bytes as
    an all-reduce, whose order depends on the number of ranks.

    Args:
        tensors: fp32, of equal shapes on all ranks.
        order: (groups, group_size): the ranks of ``group`` in rows of ``group_size``. Columns are added pairwise, then
            the sums of the columns in order.
        group: None: all ranks.
        device: on which the group exchanges tensors.

    Returns:
        tensors of the same shapes, on the devices of ``tensors``.
    """
    ranks = order[0] * order[1]
    if ranks == 1:
        return list(tensors)
    found: list[Tensor] = []
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.reshape(-1).to(device) for tensor in bucket])
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=group)
        part = _tree(received.view(*order, -1))
        dist.all_gather(list(padded.chunk(ranks)), part, group=group)
        sums = padded[: len(flat)].split([tensor.numel() for tensor in bucket])
        found += [total.view_as(tensor).to(tensor.device) for total, tensor in zip(sums, bucket, strict=True)]
    return found


def _tree(parts: Tensor) -> Tensor:
    """[G, E, n] -> [n]: neighbours of the first dimension are added until one is left, then the second in order."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    columns = parts[0]
    total = columns[0].clone()
    for column in columns[1:]:
        total += column
    return total


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of at most ``BUCKET_ELEMENTS`` together; a larger tensor is a bucket of its own."""
    found: list[list[Tensor]] = []
    filled = BUCKET_ELEMENTS
    for tensor in tensors:
        if filled + tensor.numel() > BUCKET_ELEMENTS:
            found.append([])
            filled = 0
        found[-1].append(tensor)
        filled += tensor.numel()
    return found
