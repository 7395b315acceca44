"""Brings the tokens to the experts and their outputs back."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from moe.experts import Experts
from moe.kernels.experts_op import Pairs
from moe.routing import Routing, pairs_by_token
from moe.wire import SentBytes


class Dispatcher(Protocol):
    """
    Attributes:
        sent_bytes: what it has handed to other ranks since it was made.
    """

    sent_bytes: SentBytes

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Computes y_t = sum over the pairs (t, e) of gate * expert_e(token_t).

        Args:
            tokens: [T, D].
            routing: pairs of these tokens with the experts of the whole layer.
            experts: those this rank holds.
            meanwhile: makes [T, D_out] that is added to the output, such as a shared expert's; called while
                tokens travel.

        Returns:
            [T, D_out] in the type of ``tokens``.
        """


class LocalDispatcher:
    """All experts are on this rank."""

    def __init__(self) -> None:
        self.sent_bytes = SentBytes()

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        by_token = routing.by_token or pairs_by_token(routing.tokens, len(tokens))
        output = experts(tokens, routing.counts, Pairs(routing.tokens, routing.gates, *by_token)).to(tokens.dtype)
        return output if meanwhile is None else output + meanwhile()


def combine(rows: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
    """Sums the experts' outputs [R, D_out] by token, weighted by the gates, into [T, D_out].

    The sum is in the gates' precision, float32 or better, since a token may add up many prototypes.
    """
    weighted = rows * routing.gates[:, None]
    output = weighted.new_zeros(len(tokens), rows.shape[1]).index_add(0, routing.tokens, weighted)
    return output.to(tokens.dtype)
