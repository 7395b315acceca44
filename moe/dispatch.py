"""Brings the tokens to the experts and their outputs back."""

from typing import Protocol

from torch import Tensor

from moe.experts import Experts
from moe.routing import Routing


class Dispatcher(Protocol):
    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Computes y_t = sum over the pairs (t, e) of gate * expert_e(token_t).

        Args:
            tokens: [T, D].
            routing: pairs of these tokens with the experts of the whole layer.
            experts: those this rank holds.

        Returns:
            [T, D_out] in the type of ``tokens``.
        """


class LocalDispatcher:
    """All experts are on this rank."""

    def __call__(self, tokens: Tensor, routing: Routing, experts: Experts) -> Tensor:
        rows = tokens.index_select(0, routing.tokens)
        return combine(experts(rows, routing.counts), routing, tokens)


def combine(rows: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
    """Sums the experts' outputs [R, D_out] by token, weighted by the gates, into [T, D_out].

    The sum is in the gates' precision, float32 or better, since a token may add up many prototypes.
    """
    weighted = rows * routing.gates[:, None]
    output = weighted.new_zeros(len(tokens), rows.shape[1]).index_add(0, routing.tokens, weighted)
    return output.to(tokens.dtype)
