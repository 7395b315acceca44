"""Tokens that a layer routes in several calls, with the auxiliary losses of one call for all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenParts:
    """What the calls of a layer leave for each other. All forward passes come before the first backward pass.

    Args:
        num_tokens: of all calls, without padding.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        # Part -> probabilities [Z, M], summed over its tokens, and counts of choices [Z, M]. Activation checkpointing
        # repeats a call, which then writes the same.
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}

    def add(self, part: int, sums: Tensor, counts: Tensor) -> Tensor:
        """Adds a part, and returns by how much the loss of all parts so far grew."""
        before = self._loss(sums)
        self._sums[part], self._counts[part] = sums, counts
        return self._loss(sums) - before

    def gradient(self) -> Tensor:
        """The gradient [Z, M] of the loss of all parts by sums of probabilities: M f_i / (Z T)."""
        counts = torch.stack([*self._counts.values()]).sum(0)
        shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        num_prototypes, experts_per_prototype = counts.shape
        return shares * (experts_per_prototype / num_prototypes / max(self.num_tokens, 1))

    def _loss(self, like: Tensor) -> Tensor:
        if not self._sums:
            return like.new_zeros(())
        return (self.gradient() * torch.stack([*self._sums.values()]).sum(0)).sum()


class TokenPart(NamedTuple):
    """The tokens of one call.

    Attributes:
        whole: of all calls.
        number: of the call.
    """

    whole: TokenParts
    number: int


def load_balancing_loss_of_part(probabilities: Tensor, chosen_counts: Tensor, part: TokenPart) -> Tensor:
    """Returns a part's share of ``load_balancing_loss``: the shares of all parts add up to the loss of all tokens.

    The shares f_i of all tokens are known when the last part has gone forward, in time for all backward passes.

    Args:
        probabilities: [T, Z, M] of the part.
        chosen_counts: [Z, M] of the part.
    """
    loss: Tensor = _LossOfPart.apply(probabilities.sum(0), chosen_counts, part)
    return loss


class _LossOfPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, counts: Tensor, part: TokenPart) -> Tensor:
        ctx.whole = part.whole
        return part.whole.add(part.number, sums, counts.to(sums.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.whole.gradient(), None, None
