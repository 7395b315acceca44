"""A function of a tensor, with a gradient that another function computes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def custom_gradient(
    values: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns ``forward(values)``. The backward pass calls ``backward``.

    Args:
        forward: of ``values``; autograd does not record it.
        backward: maps the gradient of the result to the gradient of ``values``.
    """
    found: Tensor = _Custom.apply(values, forward, backward)
    return found


def same(values: Tensor) -> Tensor:
    """Returns the values, as a new tensor on the same memory."""
    return values.view_as(values)


class _Custom(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.gradient_of = backward
        return forward(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient_of(grads[0]), None, None
