"""Functions with a gradient of their own, and queries of autocast, also on devices without it, such as meta."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which autocast is off for this tensor's kind of device."""
    device_type = tensor.device.type
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Returns autocast's type for this tensor; None if autocast is off, and for float64, never converted by it."""
    device_type = tensor.device.type
    if tensor.dtype == torch.float64:
        return None
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
