"""Leaves out the chunks of gradients with the smallest norms (after DLCP, arXiv 2008.08445).

DLCP lets switches drop packets of small gradients, up to a bound of loss, and divides a sum by the packets that
arrived. Networks of training clusters lose nothing, so here the ranks agree on what to leave out. A sum thus has the
terms of all ranks or of none, and is divided by their number as always. At most one minus the density of the chunks is
left out of a step. It is kept for the next one, which in DLCP is lost: measured in
scripts/experiments/gradient_bytes/README.md, the losses of both are equal within the spread of seeds, and to lose what
all ranks leave out alike is worse at densities of 30 and 50 %.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m6.planning.cost.gradient_bytes import kept_count
from m6.training.reduction.collectives import CountedCollectives


class Chunks:
    """All ranks send the same chunks, so that they are all-reduced without indices.

    A chunk's rank in the order is the sum of its squared norms over the ranks, which takes one number for each chunk.

    Args:
        size: elements of a chunk; the last one of a tensor is filled up with zeros.
    """

    def __init__(self, collectives: CountedCollectives, size: int) -> None:
        self._collectives, self._size = collectives, size

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """See ``Compressor``."""
        chunks = torch.cat([self._cut(tensor) for tensor in waiting])
        norms = chunks.square().sum(dim=1)
        self._collectives.all_reduce(norms)
        chosen = norms.topk(kept_count(len(chunks), density), sorted=False).indices
        sent = chunks[chosen]
        self._collectives.all_reduce(sent)
        sums = torch.zeros_like(chunks)
        sums[chosen], chunks[chosen] = sent, 0
        for tensor, rest in zip(waiting, self._joined(chunks, waiting), strict=True):
            tensor.copy_(rest)
        return self._joined(sums, waiting)

    def _cut(self, tensor: Tensor) -> Tensor:
        """[C, size]"""
        flat = tensor.view(-1)
        return nn.functional.pad(flat, (0, -len(flat) % self._size)).view(-1, self._size)

    def _joined(self, chunks: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Tensors of the shapes of ``like`` from the chunks of all of them."""
        parts = chunks.split([-(-tensor.numel() // self._size) for tensor in like])
        return [part.view(-1)[: each.numel()].view_as(each) for part, each in zip(parts, like, strict=True)]
