"""Brings the tokens to the experts and their outputs back."""

from typing import Protocol

from torch import Tensor

from moe.experts import Experts
from moe.kernels.experts_op import Pairs
from moe.routing import Routing, pairs_by_token


class Dispatcher(Protocol):
    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Computes y_t = sum over the pairs (t, e) of gate * expert_e(token_t).

        Args:
            tokens: [T, D].
            routing: pairs of these tokens with the experts of the whole layer.
            experts: those this rank holds.

        Returns:
            [T, D] in the type of ``tokens``.
        """


class LocalDispatcher:
    """All experts are on this rank."""

    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        by_token = routing.by_token or pairs_by_token(routing.tokens, len(tokens))
        return experts(tokens, routing.counts, Pairs(routing.tokens, routing.gates, *by_token)).to(tokens.dtype)


def combine(rows: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
    """Sums the experts' outputs [R, D] by token, weighted by the gates.

    The sum is in the gates' precision, float32 or better, since a token may add up many prototypes.
    """
    weighted = rows * routing.gates[:, None]
    output = weighted.new_zeros(tokens.shape).index_add(0, routing.tokens, weighted)
    return output.to(tokens.dtype)
