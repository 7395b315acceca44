"""Leaves out the chunks of gradients with the smallest norms (after DLCP, arXiv 2008.08445).

In DLCP, switches drop packets of small gradients up to a bound, and a sum is divided by the number of packets received.
Networks of training clusters lose no packets, so here the ranks agree on the chunks to leave out. A sum then has the
terms of all ranks or of none, and is divided by the number of ranks. A step leaves out at most the share 1 - density of
the chunks. The rest is kept for the next step; in DLCP it is lost. In the experiments of
scripts/experiments/gradient_bytes/README.md the losses of both variants are equal within the spread of seeds. A third
variant, in which all ranks lose the same chunks, is worse at densities of 30 and 50 %.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.messages import kept_count


class Chunks:
    """All ranks send the same chunks, so an all-reduce without indices is enough.

    Chunks are ordered by the sum of their squared norms over the ranks. This takes an all-reduce of one number for each
    chunk.

    Args:
        size: elements of a chunk. The last chunk of a tensor is padded with zeros.
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
        """Cuts a tensor into chunks [C, size], padded with zeros."""
        flat = tensor.view(-1)
        return nn.functional.pad(flat, (0, -len(flat) % self._size)).view(-1, self._size)

    def _joined(self, chunks: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Returns tensors with the shapes of ``like`` from the chunks of all of them."""
        parts = chunks.split([-(-tensor.numel() // self._size) for tensor in like])
        return [part.view(-1)[: each.numel()].view_as(each) for part, each in zip(parts, like, strict=True)]
