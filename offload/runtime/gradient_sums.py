"""Adds up the gradients of a chunk's uses on the device, before one gradient of all of them leaves it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GradientSums:
    """Sums of the gradients of uses that follow each other, as those of micro-batches that take turns.

    The sum of two gradients is rounded once. Sums of more are made in fp32 and rounded at their end.

    Args:
        number: the number of uses whose gradients make one sum.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._begun: dict[int, tuple[int, Sequence[Tensor]]] = {}

    def add(self, chunk: int, gradients: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Returns the sum that ends with these gradients, or None if the gradients of later uses are missing."""
        if self._number == 1:
            return gradients
        count, sums = self._begun.pop(chunk, (0, ()))
        if count:
            # The first gradients are those that autograd made: in 16 bits they are as exact as in fp32.
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
        """The chunks whose sums wait for the gradients of later uses."""
        return sorted(self._begun)
