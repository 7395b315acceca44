"""Collectives with a count of the bytes sent by this rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from m6.training.reduction.messages import BUCKET_ELEMENTS, gathered_bytes, ring_bytes


class CountedCollectives:
    """Collectives of a group of ranks.

    Args:
        group: None: all ranks.

    Attributes:
        group, ranks: the argument, and the number of its ranks.
        sent_bytes: bytes sent by this rank, if an all-reduce is a ring and in an all-gather each rank sends its part to
            every other rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.sent_bytes = 0.0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums the tensor in place."""
        if self.ranks > 1:
            dist.all_reduce(tensor, group=self.group)
            self.count_all_reduce(tensor)

    def count_all_reduce(self, tensor: Tensor) -> None:
        """Counts an all-reduce of this tensor outside of this object."""
        self.sent_bytes += ring_bytes(tensor.nbytes, self.ranks)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gathers the tensors of all ranks, in the order of ranks. All have the same shape."""
        found = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(found, tensor, group=self.group)
        self.sent_bytes += gathered_bytes(tensor.nbytes, self.ranks)
        return found

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the sums over ranks of tensors of one type. The tensors are not changed."""
        found: list[Tensor] = []
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            found += [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)]
        return found


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups consecutive tensors up to ``BUCKET_ELEMENTS`` in total. A larger tensor gets its own bucket."""
    found: list[list[Tensor]] = []
    filled = BUCKET_ELEMENTS
    for tensor in tensors:
        if filled + tensor.numel() > BUCKET_ELEMENTS:
            found.append([])
            filled = 0
        found[-1].append(tensor)
        filled += tensor.numel()
    return found
