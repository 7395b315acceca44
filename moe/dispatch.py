"""The interfaces of dispatchers, which bring tokens to experts and outputs back, and the local dispatcher."""

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
        traffic: the bytes sent to other ranks so far.
    """

    traffic: Traffic

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        concurrent: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Computes y_t = sum over the pairs (t, e) of gate * expert_e(token_t).

        Args:
            tokens: [T, D].
            routing: the pairs of these tokens with the experts of the whole layer.
            experts: the experts of this rank.
            concurrent: a branch computed during the exchange, such as the shared experts. It maps some of the tokens
                [N, D] to a summand of their outputs [N, D]. It is called while tokens are in flight.

        Returns:
            [T, D] in the type of ``tokens``.
        """

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> "StagedForward":
        """Returns the same call as a generator, suspended while rows are in flight."""


StagedForward = Generator[None, None, Tensor]


class Exchange(Protocol):
    """Dispatches tokens to the experts and combines the outputs. The caller can compute while rows are in flight.

    Attributes:
        traffic: the bytes sent to other ranks so far.
        num_hops: the number of consecutive exchanges of the dispatch; the combine has as many.
    """

    traffic: Traffic
    num_hops: int

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """Exchanges the counts of rows, and returns the rest of the call as a generator.

        The arguments are the same as for ``Dispatcher``.

        Returns:
            The generator. It pauses whenever rows are in flight: H = ``num_hops`` times in the dispatch and H times in
            the combine. So it has 2 H + 1 stages, and the experts compute in stage H, counted from 0. Its value is
            the output [T, D].
        """


class LocalDispatcher:
    """The dispatcher of layers with all experts on this rank; with expert parallelism, the innermost exchange."""

    num_hops = 0

    def __init__(self) -> None:
        self.traffic = Traffic()

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        concurrent: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``."""
        by_token = routing.by_token or pairs_by_token(routing.tokens, len(tokens))
        output = experts(tokens, routing.counts, Pairs(routing.tokens, routing.gates, *by_token)).to(tokens.dtype)
        return output if concurrent is None else output + concurrent(tokens)

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """See ``Dispatcher`` and ``Exchange``."""
        yield from ()  # it never pauses
        return self(tokens, routing, experts)


def combine(rows: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
    """Sums the experts' outputs [R, D] by token, weighted by the gates, into [T, D].

    The sum has the gates' precision, float32 or better, because a token may have an output from each of many
    prototypes. The result has the type of ``tokens``.
    """
    weighted = rows * routing.gates[:, None]
    output = weighted.new_zeros(len(tokens), rows.shape[1]).index_add(0, routing.tokens, weighted)
    return output.to(tokens.dtype)
