"""The auxiliary losses of a router: one number for each token. The loss of a call is their mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor


class Sequences(NamedTuple):
    """The assignment of tokens to sequences.

    Attributes:
        numbers: [T] int64, the sequence of each token.
        total: the number of sequences, G.
    """

    numbers: Tensor
    total: int

    def sums(self, values: Tensor) -> Tensor:
        """Sums values [T, ...] over the tokens of each sequence, [G, ...]."""
        return values.new_zeros(self.total, *values.shape[1:]).index_add(0, self.numbers, values)


def load_balancing_losses(
    probabilities: Tensor,
    chosen_counts: Tensor,
    scope: str = "micro_batch",
    sequences: Sequences | None = None,
    group: torch.distributed.ProcessGroup | None = None,
) -> Tensor:
    """Returns each token's mean over prototypes of M * sum_i f_i p_i. The mean over tokens is 1 for an even load.

    f_i is the share of the prototype's choices of expert i; it has no gradient. p_i is the token's probability of
    expert i. In every prototype, the mean over tokens is equation 4 of Switch Transformer (arXiv 2101.03961).

    With the scope "global_batch", f_i is the share over the tokens of all ranks (arXiv 2501.11873, section 3). This
    takes one all-reduce of E numbers over the ranks of ``group``. With the scope "sequence", f_i is the share over the
    tokens of a sequence (DeepSeek-V3, arXiv 2412.19437, equation 17).

    Args:
        probabilities: [T, Z, M].
        chosen_counts: [Z, M], how often each expert was chosen, with dropped choices; [G, Z, M] by sequence.
        scope: "micro_batch", "global_batch" or "sequence".
        sequences: of the tokens, for the scope "sequence".
        group: the ranks with this layer, for the scope "global_batch"; None: all.

    Returns:
        [T].
    """
    shares = shares_of(in_scope(chosen_counts.to(probabilities.dtype), scope, group))
    if sequences is not None:
        shares = shares.index_select(0, sequences.numbers)
    num_prototypes, experts_per_prototype = probabilities.shape[1:]
    return (probabilities * shares).sum((1, 2)) * (experts_per_prototype / num_prototypes)


def in_scope(counts: Tensor, scope: str, group: torch.distributed.ProcessGroup | None) -> Tensor:
    """Returns counts of choices, overwritten by their sums over the ranks of ``group`` if the scope is all ranks."""
    if scope == "global_batch" and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts, group=group)
    return counts


def shares_of(counts: Tensor) -> Tensor:
    """Divides counts of choices [..., Z, M] by their sums in each prototype; 0 without choices."""
    return counts / counts.sum(-1, keepdim=True).clamp(min=1)


def z_losses(logits: Tensor) -> Tensor:
    """Returns the mean over prototypes of logsumexp(logits)^2: ST-MoE (arXiv 2202.08906), equation 5.

    Args:
        logits: [T, Z, M].

    Returns:
        [T].
    """
    # torch.logsumexp asks whether there are any tokens. With padding, a compiler does not know their number.
    largest = logits.detach().amax(-1, keepdim=True)
    log_z = (logits - largest).exp().sum(-1).log() + largest.squeeze(-1)
    return log_z.square().mean(-1)
