"""Tensors that are exchanged together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from m6.planning.cost.gradient_bytes import BUCKET_ELEMENTS


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
