"""Adds up the gradients of several uses of a chunk on the device, so only the sum is downloaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientSums:
    """Sums of gradients of consecutive uses of a chunk, for example by interleaved micro-batches.

    The sum of two gradients is rounded once. Three or more are accumulated in fp32 and rounded at their end.

    Args:
        number: the number of uses in one sum.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._begun: dict[int, tuple[int, Sequence[Tensor]]] = {}

    def add(self, chunk: int, gradients: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Returns the complete sum, or None if gradients of later uses are still missing."""
        if self._number == 1:
            return gradients
        count, sums = self._begun.pop(chunk, (0, ()))
        if count:
            # The first summand comes from autograd; if it has 16 bits, widening it only now loses nothing.
            sums = [self._widened(total) + gradient for total, gradient in zip(sums, gradients, strict=True)]
        else:
            sums = gradients
        if count + 1 < self._number:
            self._begun[chunk] = count + 1, sums
            return None
        return [total.to(gradient.dtype) for total, gradient in zip(sums, gradients, strict=True)]

    def _widened(self, total: Tensor) -> Tensor:
        return total if self._number == 2 else total.to(torch.promote_types(total.dtype, torch.float32))

    @property
    def unfinished(self) -> list[int]:
        """The chunks with incomplete sums."""
        return sorted(self._begun)
