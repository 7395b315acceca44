"""What a dispatcher is, which brings tokens to experts and outputs back, and the one for experts on this rank."""

from collections.abc import Callable, Generator
from typing import Protocol

from torch import Tensor

from moe.collectives import Traffic
from moe.experts import Experts
from moe.kernels.experts_op import Pairs
from moe.routing import Routing, pairs_by_token


class Dispatcher(Protocol):
    """Brings tokens to the ranks of their experts, and the experts' outputs back.

    Attributes:
        traffic: the bytes that it has sent to other ranks so far.
    """

    traffic: Traffic

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        beside: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Computes y_t = sum over the pairs (t, e) of gate * expert_e(token_t).

        Args:
            tokens: [T, D].
            routing: the pairs of these tokens with the experts of the whole layer.
            experts: the experts of this rank.
            beside: computes for some of the tokens [N, D] what is added to their outputs [N, D], such as the shared
                experts' output; it is called while tokens are on their way.

        Returns:
            [T, D] in the type of ``tokens``.
        """

    def trip(self, tokens: Tensor, routing: Routing, experts: Experts) -> "Trip":
        """Returns the same call as a trip, which the caller can interrupt while rows are on their way."""


Trip = Generator[None, None, Tensor]


class Exchange(Protocol):
    """Brings tokens to the experts and back, and can be interrupted while they are on their way.

    Attributes:
        traffic: the bytes that it has sent to other ranks so far.
        num_hops: from how many exchanges one after the other the way to the experts consists, and the way back.
    """

    traffic: Traffic
    num_hops: int

    def trip(self, tokens: Tensor, routing: Routing, experts: Experts) -> Trip:
        """Exchanges the numbers that the trip needs to know.

        The arguments are those of ``Dispatcher``.

        Returns:
            The trip. It pauses whenever rows are on their way: H = ``num_hops`` times towards the experts and H times
            on the way back, so it has 2 H + 1 stages, and the experts compute in stage H, counted from 0. Its value is
            the output [T, D].
        """


class LocalDispatcher:
    """The dispatcher for layers whose experts are all on this rank, and the last exchange of those that are not."""

    num_hops = 0

    def __init__(self) -> None:
        self.traffic = Traffic()

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        beside: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``."""
        by_token = routing.by_token or pairs_by_token(routing.tokens, len(tokens))
        output = experts(tokens, routing.counts, Pairs(routing.tokens, routing.gates, *by_token)).to(tokens.dtype)
        return output if beside is None else output + beside(tokens)

    def trip(self, tokens: Tensor, routing: Routing, experts: Experts) -> Trip:
        """See ``Dispatcher`` and ``Exchange``."""
        yield from ()  # it never pauses
        return self(tokens, routing, experts)


def combine(rows: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
    """Sums the experts' outputs [R, D] by token, weighted by the gates, into [T, D].

    The sum has the gates' precision, which is float32 or better, because a token may have an output from each of many
    prototypes. The result has the type of ``tokens``.
    """
    weighted = rows * routing.gates[:, None]
    output = weighted.new_zeros(len(tokens), rows.shape[1]).index_add(0, routing.tokens, weighted)
    return output.to(tokens.dtype)
