"""Sends the largest elements of each gradient, as pairs of index and value (RedSync, arXiv 1808.04357)."""

from __future__ import annotations

import torch
from torch import Tensor

from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.messages import kept_count

_MAX_ELEMENTS = 2**31 - 1  # indices are sent as int32


class TopK:
    """Each rank chooses its own elements. An all-gather collects the messages; every rank adds them in rank order."""

    def __init__(self, collectives: CountedCollectives) -> None:
        self._collectives = collectives

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """See ``Compressor``."""
        indices, values = [], []
        for tensor in waiting:
            if tensor.numel() > _MAX_ELEMENTS:
                raise ValueError(f"a gradient of {tensor.numel()} elements: their indices do not fit into 32 bits")
            flat = tensor.view(-1)
            chosen = flat.abs().topk(kept_count(flat.numel(), density), sorted=False).indices
            indices.append(chosen.int())
            values.append(flat[chosen])
            flat[chosen] = 0
        counts = [len(chosen) for chosen in indices]
        all_indices = [each.split(counts) for each in self._collectives.all_gather(torch.cat(indices))]
        all_values = [each.split(counts) for each in self._collectives.all_gather(torch.cat(values))]
        sums = [torch.zeros_like(tensor) for tensor in waiting]
        for number, total in enumerate(sums):
            # One rank after the other, for a fixed order of additions: a rank's message has each index at most once.
            for index, value in zip(all_indices, all_values, strict=True):
                total.view(-1).index_add_(0, index[number], value[number])
        return sums
