"""Tokens that a layer routes in several calls, with the auxiliary losses of one call for all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.losses import Sequences, shares_of


class TokenParts:
    """What the calls of a layer leave for each other. All forward passes come before the first backward pass.

    Args:
        num_tokens: of all calls, without padding.
        sequences_per_row: how many sequences a row has at most.
    """

    def __init__(self, num_tokens: int, sequences_per_row: int = 1) -> None:
        self.num_tokens, self.sequences_per_row = num_tokens, sequences_per_row
        # Part -> probabilities [G, Z, M], summed over its tokens, and counts of choices [G, Z, M], of each sequence or
        # of all tokens together. Activation checkpointing repeats a call, which then writes the same.
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}

    def add(self, part: int, sums: Tensor, counts: Tensor) -> Tensor:
        """Adds a part, and returns by how much the loss of all parts so far grew."""
        before = self._loss(sums)
        self._sums[part], self._counts[part] = sums, counts
        return self._loss(sums) - before

    def gradient(self) -> Tensor:
        """The gradient [G, Z, M] of the loss of all parts by sums of probabilities: M f_i / (Z T)."""
        counts = torch.stack([*self._counts.values()]).sum(0)
        num_prototypes, experts_per_prototype = counts.shape[1:]
        return shares_of(counts) * (experts_per_prototype / num_prototypes / max(self.num_tokens, 1))

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


def load_balancing_loss_of_part(
    probabilities: Tensor, chosen_counts: Tensor, part: TokenPart, sequences: Sequences | None = None
) -> Tensor:
    """Returns a part's share of the mean of ``load_balancing_losses``: the shares of all parts add up to it.

    The shares f_i of all tokens are known when the last part has gone forward, in time for all backward passes.

    Args:
        probabilities: [T, Z, M] of the part.
        chosen_counts: [Z, M] of the part, or [G, Z, M].
        sequences: of the part's tokens, if the loss counts each by itself.
    """
    loss: Tensor = _LossOfPart.apply(probabilities, chosen_counts, part, sequences)
    return loss


class _LossOfPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probabilities: Tensor, counts: Tensor, part: TokenPart, sequences: Sequences | None
    ) -> Tensor:
        ctx.whole, ctx.sequences, ctx.num_tokens = part.whole, sequences, len(probabilities)
        sums = probabilities.sum(0, keepdim=True) if sequences is None else sequences.sums(probabilities)
        return part.whole.add(part.number, sums, counts.to(sums.dtype).view_as(sums))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = grads[0] * ctx.whole.gradient()
        if ctx.sequences is None:
            return gradient.expand(ctx.num_tokens, -1, -1), None, None, None
        return gradient.index_select(0, ctx.sequences.numbers), None, None, None
