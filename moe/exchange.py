"""Dispatchers for experts on other ranks of an expert-parallel group.

Expert numbers are prototype-major, and rank r of n holds the r-th n-th of them. The all-to-all alone is complete; the
other two carry tokens to a part of the group, which a dispatcher inside of them goes on to divide.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe.dispatch import Dispatcher, combine
from moe.experts import Experts
from moe.routing import Routing
from moe.wire import Wire


class AllToAllDispatcher:
    """Sends every (token, expert) pair to the rank of its expert, and the output back; the gates stay.

    One exchange each way for all prototypes. Nothing is padded: the ranks first tell each other how many rows they
    send, which waits for the device once.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire, self.sent_bytes = wire, wire.sent_bytes

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        sent_counts = routing.counts.view(self.wire.size, -1)
        received_counts = self.wire.exchange(sent_counts)
        sent, received = torch.stack((sent_counts.sum(1), received_counts.sum(1))).tolist()

        travelling = self.wire.all_to_all(tokens.index_select(0, routing.tokens), sent, received, to_experts=True)
        beside = meanwhile() if meanwhile else None
        rows = travelling.wait()

        order = _order_by_expert(received_counts, sum(received))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        rows = experts(rows.index_select(0, order), received_counts.sum(0)).index_select(0, inverse)

        rows = self.wire.all_to_all(rows, received, sent, to_experts=False).wait()
        output = combine(rows, routing, tokens)
        return output if beside is None else output + beside


class PrototypeDispatcher:
    """Every rank has whole prototypes, so every rank needs every token: all-gather in, reduce-scatter out.

    Each token has as many pairs in one prototype as in any other. So each rank receives all tokens of all ranks and
    equally many pairs, whatever the router does; the sum over prototypes happens on the way back. MoGE (arXiv
    2505.21411) routes alike, without the exchange.

    Ranks with fewer tokens pad up to the one with most. For that, and for pairs that a capacity dropped, the ranks tell
    each other their numbers first, which waits for the device once; ``equal_tokens`` saves it.

    Args:
        wire: joins the ranks whose prototypes differ.
        inner: brings the tokens to the experts of this rank's prototypes.
        pairs_per_token: pairs of each token that comes here.
        equal_tokens: the caller promises that all ranks always bring the same number of tokens, and drop none.

    Raises:
        ValueError: a promise of equal tokens is seen to be broken.
    """

    def __init__(self, wire: Wire, inner: Dispatcher, pairs_per_token: int, equal_tokens: bool = False) -> None:
        self.wire, self.inner, self.sent_bytes = wire, inner, wire.sent_bytes
        self.pairs_per_token, self.equal_tokens = pairs_per_token, equal_tokens

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        size, num_tokens = self.wire.size, len(tokens)
        counts = routing.counts.view(size, -1)
        if self.equal_tokens:
            num_pairs = len(routing.tokens)
            if num_pairs != num_tokens * self.pairs_per_token:
                raise ValueError(
                    f"equal_tokens was promised, but {num_tokens} tokens have {num_pairs} pairs; "
                    f"expected {self.pairs_per_token} each, so set no capacity"
                )
            each = [num_pairs // size] * size
            pairs, longest = _Pairs(self.wire.exchange(counts), each, each), num_tokens
        else:
            pairs, rows = _tell(self.wire, counts, torch.full((size,), num_tokens, device=counts.device))
            longest = max(rows.received)

        padded = nn.functional.pad(tokens, (0, 0, 0, longest - num_tokens)) if longest > num_tokens else tokens
        travelling = self.wire.all_gather(padded)
        first_rows = torch.arange(size, device=counts.device) * longest
        local = _send_pairs(self.wire, routing, routing.tokens, pairs, first_rows)
        beside = meanwhile() if meanwhile else None
        output = self.inner(travelling.wait(), local, experts)
        output = self.wire.reduce_scatter(output).wait()[:num_tokens]
        return output if beside is None else output + beside


class NodeDispatcher:
    """Sends every token once to each node that has experts for it, where an inner dispatcher goes on.

    The node also sums the token's outputs, so that one row goes back. It waits for the device once.

    Args:
        wire: joins the ranks that have the same place in their nodes.
        inner: the dispatcher among the ranks of a node.
    """

    def __init__(self, wire: Wire, inner: Dispatcher) -> None:
        self.wire, self.inner, self.sent_bytes = wire, inner, wire.sent_bytes

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        size, num_tokens = self.wire.size, len(tokens)
        counts = routing.counts.view(size, -1)
        nodes = _sources(counts.sum(1), len(routing.tokens))
        # One row for each (node, token) that occurs, in this order.
        keys = nodes * num_tokens + routing.tokens
        occurs = counts.new_zeros(size * num_tokens).index_fill(0, keys, 1)
        rows_per_node = occurs.view(size, num_tokens).sum(1)
        pairs, rows = _tell(self.wire, counts, rows_per_node)
        row_of_pair = (occurs.cumsum(0) - 1)[keys]
        token_of_row = routing.tokens.new_empty(sum(rows.sent)).index_copy(0, row_of_pair, routing.tokens)

        travelling = self.wire.all_to_all(
            tokens.index_select(0, token_of_row), rows.sent, rows.received, to_experts=True
        )
        first_sent = rows_per_node.cumsum(0) - rows_per_node
        local = _send_pairs(self.wire, routing, row_of_pair - first_sent[nodes], pairs, rows.first_received)
        beside = meanwhile() if meanwhile else None
        sums = self.inner(travelling.wait(), local, experts)
        sums = self.wire.all_to_all(sums, rows.received, rows.sent, to_experts=False).wait()
        sums = sums.to(routing.gates.dtype)
        output = sums.new_zeros(num_tokens, sums.shape[1]).index_add(0, token_of_row, sums).to(tokens.dtype)
        return output if beside is None else output + beside


class _Pairs(NamedTuple):
    """Pairs that go from rank to rank; lists have one entry a rank.

    Attributes:
        received_counts: [n, E / n] those from each rank for each of the experts here.
    """

    received_counts: Tensor
    sent: list[int]
    received: list[int]


class _Rows(NamedTuple):
    """Rows of tokens that go from rank to rank.

    Attributes:
        first_received: [n] the rows that come before those of each rank.
    """

    first_received: Tensor
    sent: list[int]
    received: list[int]


def _tell(wire: Wire, counts: Tensor, num_rows: Tensor) -> tuple[_Pairs, _Rows]:
    """Tells each rank the pairs of each of its experts [n, E / n] and the rows [n] that will come to it."""
    reply = wire.exchange(torch.cat((counts, num_rows[:, None]), 1))
    received_counts, received_rows = reply[:, :-1], reply[:, -1]
    totals = torch.stack((counts.sum(1), received_counts.sum(1), num_rows, received_rows))
    sent_pairs, received_pairs, sent_rows, rows = totals.tolist()
    first_received = received_rows.cumsum(0) - received_rows
    return _Pairs(received_counts, sent_pairs, received_pairs), _Rows(first_received, sent_rows, rows)


def _send_pairs(wire: Wire, routing: Routing, positions: Tensor, pairs: _Pairs, first_rows: Tensor) -> Routing:
    """Brings the pairs to the ranks of their experts, sorted there by expert and then by source.

    Args:
        positions: [R] the pair's row among those that its destination gets from here.
        first_rows: [n] where the rows of each source begin here.
    """
    gates = wire.exchange_exactly(routing.gates[:, None], pairs.sent, pairs.received).squeeze(1)
    rows = wire.exchange(positions.int(), pairs.sent, pairs.received)
    rows = rows + first_rows[_sources(pairs.received_counts.sum(1), len(gates))]
    order = _order_by_expert(pairs.received_counts, len(gates))
    return Routing(tokens=rows[order], gates=gates[order], counts=pairs.received_counts.sum(0))


def _sources(counts: Tensor, total: int) -> Tensor:
    """[n] numbers of consecutive items -> [total] which of the n each belongs to."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)


def _order_by_expert(received_counts: Tensor, total: int) -> Tensor:
    """Pairs came by source and then by expert; the order that makes it by expert and then by source."""
    size, num_local_experts = received_counts.shape
    experts = torch.arange(num_local_experts, device=received_counts.device).repeat(size)
    return experts.repeat_interleave(received_counts.reshape(-1), output_size=total).argsort(stable=True)
