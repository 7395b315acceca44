"""Gradients of weights that are computed late: while tokens are on their way, not before they set out.

The two gradients of a linear map do not depend on each other, and others wait only for that of its input (zero-bubble
pipelines, arXiv 2401.10241, section 2, divide them likewise).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LateGradient:
    """The gradient of a weight by one of its uses.

    Attributes:
        compute: computes it; set by the backward pass of the use.
    """

    compute: Callable[[], Tensor] | None = None


class LateUses:
    """The uses of a module's weight whose gradients are to come late.

    ``prepare`` adds a node to autograd's graph that computes the gradient. Of the nodes that can run autograd begins
    with the newest. So the gradient comes after everything that can run and that the forward pass did between
    ``prepare`` and the use.
    """

    def __init__(self) -> None:
        self._prepared: list[tuple[Tensor, LateGradient]] = []

    def prepare(self, weight: Tensor) -> None:
        """Adds the node for the next use that has none; nothing where there will be no gradient."""
        if torch.is_grad_enabled() and weight.requires_grad:
            late = LateGradient()
            self._prepared.append((_Late.apply(weight, late), late))

    def take(self, weight: Tensor) -> tuple[Tensor, LateGradient | None]:
        """The weight for a use, and its late gradient; None if the use is not prepared."""
        return self._prepared.pop(0) if self._prepared else (weight, None)


def prepare_late_gradients(module: nn.Module) -> None:
    """Prepares each ``LateLinear`` and router in a module for one use."""
    for part in module.modules():
        late = getattr(part, "late", None)
        if isinstance(late, LateUses):
            late.prepare(part.weight)  # type: ignore[arg-type]


class LateLinear(nn.Linear):
    """A linear map; the gradient of its weight comes late where it is prepared."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.late = LateUses()

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., P] to [..., Q]."""
        weight, late = self.late.take(self.weight)
        return super().forward(input) if late is None else _Linear.apply(input, weight, self.bias, late)


class _Late(torch.autograd.Function):
    """Returns the weight; its backward pass computes the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, late: LateGradient) -> Tensor:
        ctx.late = late
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        compute, ctx.late.compute = ctx.late.compute, None
        return compute(), None


class _Linear(torch.autograd.Function):
    """A linear map that leaves the gradient of its weight behind."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, late: LateGradient) -> Tensor:
        output = F.linear(inputs, weight, bias)
        ctx.save_for_backward(inputs, weight)
        ctx.dtype, ctx.bias_dtype, ctx.late = output.dtype, None if bias is None else bias.dtype, late
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        dtype, rows = ctx.dtype, grads[0].flatten(0, -2)  # the type is autocast's if autocast was on
        ctx.late.compute = lambda: (rows.t() @ inputs.flatten(0, -2).to(dtype)).to(weight.dtype)
        d_inputs = (rows @ weight.to(dtype)).view_as(inputs).to(inputs.dtype)
        d_bias = None if ctx.bias_dtype is None else rows.sum(0).to(ctx.bias_dtype)
        return d_inputs, placeholder(weight), d_bias, None


def placeholder(weight: Tensor) -> Tensor:
    """Stands for a late gradient, so that autograd goes on to the node that computes it."""
    return weight.new_zeros(()).expand(weight.shape)
