"""Deferred weight gradients: computed while a dispatch or combine is in flight, not before it starts.

The gradients of a linear map's weight and input do not depend on each other, and the rest of the backward pass waits
only for the gradient of the input. Zero-bubble pipelines (arXiv 2401.10241, section 2) split them in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from moe.autograd import autocast_dtype


class DeferredGradient:
    """The weight gradient of one use of a weight.

    Attributes:
        compute: computes the gradient; set by the backward pass of the use.
    """

    compute: Callable[[], Tensor] | None = None


class DeferredGradients:
    """The uses of a module's weight with deferred gradients, in call order.

    ``prepare`` adds a node to autograd's graph; its backward pass computes the weight gradient. Among the ready nodes,
    autograd runs the most recently created one first. The gradient is therefore computed after the backward pass of
    all operations between ``prepare`` and the use, except operations still waiting for other gradients.
    """

    def __init__(self) -> None:
        self._prepared: list[tuple[Tensor, DeferredGradient]] = []

    def prepare(self, weight: Tensor) -> None:
        """Adds a node for the next use without one; a no-op if the weight needs no gradient."""
        if torch.is_grad_enabled() and weight.requires_grad:
            deferred = DeferredGradient()
            self._prepared.append((_Deferred.apply(weight, deferred), deferred))

    def take(self, weight: Tensor) -> tuple[Tensor, DeferredGradient | None]:
        """Returns the weight for a use, and its deferred gradient; None if the use was not prepared."""
        return self._prepared.pop(0) if self._prepared else (weight, None)

    def clear(self) -> None:
        """Forgets prepared uses without a forward pass, as after an error."""
        self._prepared.clear()


def defer_gradients(module: nn.Module) -> None:
    """Prepares each ``DeferredLinear`` and router in a module for one use."""
    for part, uses in _parts(module):
        uses.prepare(part.weight)  # type: ignore[arg-type]


def clear_deferred_gradients(module: nn.Module) -> None:
    """Forgets all prepared uses in a module without a forward pass."""
    for _, uses in _parts(module):
        uses.clear()


def _parts(module: nn.Module) -> list[tuple[nn.Module, DeferredGradients]]:
    found = ((part, vars(part).get("deferred")) for part in module.modules())
    return [(part, uses) for part, uses in found if isinstance(uses, DeferredGradients)]


class DeferredLinear(nn.Linear):
    """A linear map with a bias. Its weight gradient is deferred for prepared uses."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.deferred = DeferredGradients()

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., P] to [..., Q]."""
        weight, deferred = self.deferred.take(self.weight)
        return super().forward(input) if deferred is None else _Linear.apply(input, weight, self.bias, deferred)


class _Deferred(torch.autograd.Function):
    """Returns the weight. The backward pass computes the deferred gradient."""

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
    """A linear map. Its backward pass stores the computation of the weight gradient in ``deferred``."""

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
    """Returns zeros in place of a deferred gradient. Autograd needs a value to continue to the node of ``prepare``."""
    return weight.new_zeros((), dtype=dtype).expand(weight.shape)
