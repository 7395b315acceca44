"""Collectives with a count of the bytes sent by this rank. They use the links inside nodes first.

With N nodes of L ranks a node-first sum of B bytes is a reduce-scatter in each node, a sum of one L-th between nodes,
and an all-gather in each node (Jia et al., arXiv 1807.11205; swCaffe, arXiv 1903.06934).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from m6.training.reduction.messages import BUCKET_ELEMENTS, gathered_bytes, ring_bytes


@dataclass(frozen=True)
class NodeGroups:
    """The ranks of a group, by nodes.

    Attributes:
        number: of this rank's node, among those of the group.
        ranks_of_node: ranks of the group on each node.
        inside: those on this rank's node.
        between: one rank of each node, at the same place as this rank.
    """

    number: int
    ranks_of_node: int
    inside: dist.ProcessGroup
    between: dist.ProcessGroup


class CountedCollectives:
    """Collectives of a group of ranks.

    Args:
        group: None: all ranks.
        nodes: the ranks of ``group`` by nodes; None: one exchange with all ranks.
        ring_between_nodes: the share of ranks whose next one is on another node.

    Attributes:
        group, ranks: the argument, and the number of its ranks.
        sent_bytes: bytes sent by this rank, if an all-reduce is a ring and in an all-gather each rank sends its part to
            every other rank. Node-first collectives send as many.
        sent_between_nodes: the part of ``sent_bytes`` for other nodes, in the mean of ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        nodes: NodeGroups | None = None,
        ring_between_nodes: float = 0.0,
    ) -> None:
        self.group, self.nodes, self.ring_between_nodes = group, nodes, ring_between_nodes
        self.ranks = dist.get_world_size(group)
        self.sent_bytes = self.sent_between_nodes = 0.0

    @property
    def _nodes_and_ranks(self) -> tuple[int, int]:
        """The number of nodes, and of ranks of the group on each."""
        assert self.nodes is not None
        return self.ranks // self.nodes.ranks_of_node, self.nodes.ranks_of_node

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums the tensor in place."""
        if self.ranks == 1:
            return
        if self.nodes is None:
            dist.all_reduce(tensor, group=self.group)
            self.count_ring(ring_bytes(tensor.nbytes, self.ranks))
            return
        self.sent_bytes += ring_bytes(tensor.nbytes, self.ranks)
        nodes, local = self._nodes_and_ranks
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % local))
        own = padded.new_empty(padded.numel() // local)
        dist.reduce_scatter_single(own, padded, group=self.nodes.inside)
        dist.all_reduce(own, group=self.nodes.between)
        dist.all_gather(list(padded.view(local, -1).unbind()), own, group=self.nodes.inside)
        tensor.copy_(padded[: tensor.numel()].view_as(tensor))
        self.sent_between_nodes += ring_bytes(own.nbytes, nodes)

    def count_ring(self, sent_bytes: float) -> None:
        """Counts bytes sent by this rank outside of this object, in a ring of ranks in order."""
        self.sent_bytes += sent_bytes
        self.sent_between_nodes += sent_bytes * self.ring_between_nodes

    def reduce_scatter(self, rows: Tensor) -> Tensor:
        """Sums rows [ranks, n] over ranks, and returns the row of this rank [n]."""
        if self.ranks == 1:
            return rows[0]
        total = torch.empty_like(rows[0])
        if self.nodes is None:
            dist.reduce_scatter_single(total, rows.flatten(), group=self.group)
            self.count_ring(ring_bytes(rows.nbytes, self.ranks) / 2)
            return total
        self.sent_bytes += ring_bytes(rows.nbytes, self.ranks) / 2
        nodes, local = self._nodes_and_ranks
        of_place = rows.view(nodes, local, -1).transpose(0, 1).reshape(local, -1)
        own = torch.empty_like(of_place[0])  # [nodes * n]: for the ranks at this rank's place on all nodes
        dist.reduce_scatter_single(own, of_place.flatten(), group=self.nodes.inside)
        dist.reduce_scatter_single(total, own, group=self.nodes.between)
        self.sent_between_nodes += ring_bytes(own.nbytes, nodes) / 2
        return total

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gathers the tensors of all ranks, in the order of ranks. All have the same shape."""
        if self.nodes is None:
            self.count_ring(gathered_bytes(tensor.nbytes, self.ranks))
            return _gathered(tensor, self.group, self.ranks)
        self.sent_bytes += gathered_bytes(tensor.nbytes, self.ranks)
        nodes, local = self._nodes_and_ranks
        of_place = torch.stack(_gathered(tensor, self.nodes.between, nodes))
        self.sent_between_nodes += gathered_bytes(tensor.nbytes, nodes)
        places = _gathered(of_place, self.nodes.inside, local)
        return [place[node] for node in range(nodes) for place in places]

    def sums(self, tensors: Sequence[Tensor], sent_type: torch.dtype | None = None) -> Iterator[Tensor]:
        """Yields the sums over ranks of tensors of one type, message by message. The tensors are not changed.

        Args:
            sent_type: the number format of messages and sums; None: that of the tensors.
        """
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            flat = flat if sent_type is None else flat.to(sent_type)
            self.all_reduce(flat)
            parts = flat.split([tensor.numel() for tensor in bucket])
            yield from (part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True))


def _gathered(tensor: Tensor, group: dist.ProcessGroup | None, ranks: int) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(found, tensor, group=group)
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
