"""Tokens routed in several calls of a layer, with the auxiliary losses and the drops of one call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.losses import Sequences, in_scope, shares_of


class SequenceSlices:
    """Shared state of the calls of a layer. All forward passes come before the first backward pass.

    Args:
        num_tokens: the number of tokens of all calls, without padding.
        sequences_per_row: the largest number of sequences in a row.
    """

    def __init__(self, num_tokens: int, sequences_per_row: int = 1) -> None:
        self.num_tokens, self.sequences_per_row = num_tokens, sequences_per_row
        # Part -> probabilities [G, Z, M], summed over its tokens, and counts of choices [G, Z, M], of each sequence or
        # of all tokens together. If activation checkpointing repeats a call, the call writes the same values again.
        self._sums: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._of_scope: Tensor | None = None
        self._chosen: dict[int, Tensor] = {}  # choices [E] of each part, with a capacity
        self._capacity: Tensor | None = None

    def free_places(self, part: int, chosen: Tensor, capacity: Tensor) -> Tensor:
        """Returns how many pairs of a part each expert computes at most, [E]: what earlier parts left of its capacity.

        Args:
            part: later parts have larger numbers.
            chosen: [E], how often the part chose each expert.
            capacity: [E], of all parts. Only that of the first call counts: it may be random.
        """
        self._chosen[part] = chosen
        self._capacity = capacity if self._capacity is None else self._capacity
        earlier = [counts for number, counts in self._chosen.items() if number < part]
        return (self._capacity - sum(earlier)).clamp(min=0) if earlier else self._capacity

    def add(
        self,
        part: SequenceSlice,
        sums: Tensor,
        counts: Tensor,
        scope: str,
        group: torch.distributed.ProcessGroup | None,
    ) -> Tensor:
        """Adds a part, and returns the growth of the loss of all parts so far.

        With the scope "global_batch" the last part learns the choices of all ranks, and has the whole loss.
        """
        before = self._loss(sums, scope)
        self._sums[part.number], self._counts[part.number] = sums, counts
        if part.is_last and self._of_scope is None:
            self._of_scope = in_scope(self._total(), scope, group)
        return self._loss(sums, scope) - before

    def gradient(self) -> Tensor:
        """Returns the gradient [G, Z, M] of the loss of all parts by the sums of probabilities: M f_i / (Z T)."""
        counts = self._total() if self._of_scope is None else self._of_scope
        num_prototypes, experts_per_prototype = counts.shape[1:]
        return shares_of(counts) * (experts_per_prototype / num_prototypes / max(self.num_tokens, 1))

    def _total(self) -> Tensor:
        return torch.stack([*self._counts.values()]).sum(0)

    def _loss(self, like: Tensor, scope: str) -> Tensor:
        if not self._sums or (scope == "global_batch" and self._of_scope is None):
            return like.new_zeros(())
        return (self.gradient() * torch.stack([*self._sums.values()]).sum(0)).sum()


class SequenceSlice(NamedTuple):
    """One call among the calls for all tokens.

    Attributes:
        whole: the shared state of all calls.
        number: the number of this call.
        is_last: whether this is the last call.
    """

    whole: SequenceSlices
    number: int
    is_last: bool = False


def load_balancing_loss_of_part(
    probabilities: Tensor,
    chosen_counts: Tensor,
    part: SequenceSlice,
    scope: str = "micro_batch",
    sequences: Sequences | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """Returns a part's summand of the mean of ``load_balancing_losses`` over all tokens.

    The shares f_i of all tokens are known after the forward pass of the last part, in time for all backward passes.

    Args:
        probabilities: [T, Z, M] of the part.
        chosen_counts: [Z, M] of the part, or [G, Z, M] by sequence.
        scope, group: see ``load_balancing_losses``.
        sequences: of the part's tokens, if each sequence is balanced by itself.
    """
    loss: Tensor = _LossOfPart.apply(probabilities, chosen_counts, part, scope, sequences, group)
    return loss


class _LossOfPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probabilities: Tensor,
        counts: Tensor,
        part: SequenceSlice,
        scope: str,
        sequences: Sequences | None,
        group: torch.distributed.ProcessGroup | None,
    ) -> Tensor:
        ctx.whole, ctx.sequences, ctx.num_tokens = part.whole, sequences, len(probabilities)
        sums = probabilities.sum(0, keepdim=True) if sequences is None else sequences.sums(probabilities)
        counts = counts.to(sums.dtype).view_as(sums)
        return part.whole.add(part, sums, counts, scope, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient = grads[0] * ctx.whole.gradient()
        if ctx.sequences is None:
            return gradient.expand(ctx.num_tokens, -1, -1), None, None, None, None, None
        return gradient.index_select(0, ctx.sequences.numbers), None, None, None, None, None
