"""A linear map in a wider type than its input and its weight."""

from typing import Any

import torch
from torch import Tensor, nn

from moe.deferred_gradients import DeferredGradient, placeholder
from moe.precision import without_autocast


class WideLinear(torch.autograd.Function):
    """Computes (noise * x) W^T in a wider type than x and W.

    It keeps x and W in their own types for the backward pass. Autograd would keep wide copies, with equal results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        weight: Tensor,
        noise: Tensor | None,
        dtype: torch.dtype,
        deferred: DeferredGradient | None = None,
    ) -> Tensor:
        """Returns [T, E] of type ``dtype`` from tokens [T, D], weight [E, D] and noise [T, D] of type ``dtype``.

        ``deferred`` gets the computation of the weight's gradient.
        """
        ctx.save_for_backward(tokens, weight, noise)
        ctx.deferred = deferred
        return nn.functional.linear(_noisy(tokens.to(dtype), noise), weight.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of tokens and weight."""
        tokens, weight, noise = ctx.saved_tensors
        grad, d_tokens, d_weight = grads[0], None, None

        def of_weight() -> Tensor:
            with without_autocast(grad):
                return (grad.t() @ _noisy(tokens.to(grad.dtype), noise)).to(weight.dtype)

        if ctx.needs_input_grad[0]:
            with without_autocast(grad):
                d_tokens = _noisy(grad @ weight.to(grad.dtype), noise).to(tokens.dtype)
        if ctx.deferred is not None:
            ctx.deferred.compute, d_weight = of_weight, placeholder(weight, weight.dtype)
        elif ctx.needs_input_grad[1]:
            d_weight = of_weight()
        return d_tokens, d_weight, None, None, None


def _noisy(rows: Tensor, noise: Tensor | None) -> Tensor:
    return rows if noise is None else rows * noise
