"""Gradients of weights that are computed while tokens are on their way, not before they set out.

The two gradients of a linear map do not depend on each other, and others wait only for that of its input (zero-bubble
pipelines, arXiv 2401.10241, section 2, divide them likewise).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moe.precision import autocast_dtype


class DeferredGradient:
    """The gradient of a weight by one of its uses.

    Attributes:
        compute: computes it; set by the backward pass of the use.
    """

    compute: Callable[[], Tensor] | None = None


class DeferredUses:
    """The uses of a module's weight whose gradients are deferred, in their order.

    ``prepare`` adds a node to autograd's graph that computes the gradient. Of the nodes that are ready autograd runs
    the one that the forward pass made last. So the gradient comes after the backward pass of what the forward pass did
    between ``prepare`` and the use, except for what itself waits for other gradients.
    """

    def __init__(self) -> None:
        self._prepared: list[tuple[Tensor, DeferredGradient]] = []

    def prepare(self, weight: Tensor) -> None:
        """Adds the node for the next use that has none; nothing where there will be no gradient."""
        if torch.is_grad_enabled() and weight.requires_grad:
            deferred = DeferredGradient()
            self._prepared.append((_Deferred.apply(weight, deferred), deferred))

    def take(self, weight: Tensor) -> tuple[Tensor, DeferredGradient | None]:
        """The weight for a use, and its deferred gradient; None if the use is not prepared."""
        return self._prepared.pop(0) if self._prepared else (weight, None)

    def clear(self) -> None:
        """Forgets uses that never came, as after an error."""
        self._prepared.clear()


def defer_gradients(module: nn.Module) -> None:
    """Prepares each ``DeferredLinear`` and router in a module for one use."""
    for part, uses in _parts(module):
        uses.prepare(part.weight)  # type: ignore[arg-type]


def forget_deferred(module: nn.Module) -> None:
    """Forgets all uses that were prepared in a module and never came."""
    for _, uses in _parts(module):
        uses.clear()


def _parts(module: nn.Module) -> list[tuple[nn.Module, DeferredUses]]:
    found = ((part, vars(part).get("deferred")) for part in module.modules())
    return [(part, uses) for part, uses in found if isinstance(uses, DeferredUses)]


class DeferredLinear(nn.Linear):
    """A linear map with a bias; the gradient of its weight is deferred where it is prepared."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.deferred = DeferredUses()

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., P] to [..., Q]."""
        weight, deferred = self.deferred.take(self.weight)
        return super().forward(input) if deferred is None else _Linear.apply(input, weight, self.bias, deferred)


class _Deferred(torch.autograd.Function):
    """Returns the weight; its backward pass computes the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, deferred: DeferredGradient) -> Tensor:
        ctx.deferred = deferred
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        compute, ctx.deferred.compute = ctx.deferred.compute, None
        return compute(), None


class _Linear(torch.autograd.Function):
    """A linear map that leaves the gradient of its weight behind."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, deferred: DeferredGradient) -> Tensor:
        ctx.deferred, ctx.dtypes = deferred, (inputs.dtype, weight.dtype, bias.dtype)
        dtype = autocast_dtype(inputs) or inputs.dtype
        inputs, weight = inputs.to(dtype), weight.to(dtype)
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs, weight, bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        (inputs, weight), (of_inputs, of_weight, of_bias) = ctx.saved_tensors, ctx.dtypes
        rows = grads[0].flatten(0, -2)
        ctx.deferred.compute = lambda: (rows.t() @ inputs.flatten(0, -2)).to(of_weight)
        d_inputs = (rows @ weight).view_as(inputs).to(of_inputs)
        return d_inputs, placeholder(weight, of_weight), rows.sum(0).to(of_bias), None


def placeholder(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Stands for a deferred gradient, so that autograd goes on to the node that computes it."""
    return weight.new_zeros((), dtype=dtype).expand(weight.shape)
