"""Buckets: groups of tensors for one collective."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from m6.planning.cost.gradient_bytes import BUCKET_ELEMENTS


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
