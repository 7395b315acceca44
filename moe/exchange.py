"""Exchanges with experts on other ranks of an expert-parallel group.

Experts are numbered group by group, inside a group prototype by prototype. Rank r of n holds the r-th of n equal parts
of the numbers.
``AllToAllExchange`` brings tokens to the right rank by itself. The other two bring tokens to a part of the group, and
an inner exchange brings them to the right rank of this part.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe.collectives import Collectives
from moe.dispatch import Exchange, StagedForward, combine
from moe.experts import Experts
from moe.routing import Routing


class AllToAllExchange:
    """Sends every (token, expert) pair to the rank of its expert, and the output back; the gates are not sent.

    One all-to-all in each direction serves all prototypes. Nothing is padded: the ranks first exchange the counts of
    rows. The host waits for the device once, for these counts.

    Args:
        ranks: connects all ranks of the expert-parallel group, or of one part of an outer exchange.
    """

    num_hops = 1

    def __init__(self, ranks: Collectives) -> None:
        self.ranks, self.traffic = ranks, ranks.traffic

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """See ``Exchange``."""
        sent_counts = routing.counts.view(self.ranks.size, -1)
        received_counts = self.ranks.exchange(sent_counts).wait()
        sent, received = torch.stack((sent_counts.sum(1), received_counts.sum(1))).tolist()
        return self._stages(tokens, routing, experts, _Pairs(received_counts, sent, received))

    def _stages(self, tokens: Tensor, routing: Routing, experts: Experts, pairs: "_Pairs") -> StagedForward:
        rows = tokens.index_select(0, routing.tokens)
        pending = self.ranks.all_to_all(rows, pairs.sent, pairs.received, to_experts=True)
        del rows  # a paused pass would keep it
        yield
        # The experts need rows sorted by expert, and the exchange back needs them sorted by source.
        order = _order_by_expert(pairs.received_counts, sum(pairs.received))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        rows = experts(pending.wait().index_select(0, order), pairs.received_counts.sum(0)).index_select(0, inverse)
        pending = self.ranks.all_to_all(rows, pairs.received, pairs.sent, to_experts=False)
        del rows
        yield
        return combine(pending.wait(), routing, tokens)


class PrototypeExchange:
    """Sends all tokens to all ranks by an all-gather, and the outputs back by a reduce-scatter.

    It is for ranks with whole prototypes. Each token has as many pairs in one prototype as in any other. Every rank
    therefore needs every token and computes equally many pairs, whatever the router does. The reduce-scatter sums over
    the prototypes. MoGE (arXiv 2505.21411) has the same routing, without this exchange.

    Every rank pads its tokens to the largest number of tokens of a rank. The ranks therefore exchange their numbers of
    tokens, and of pairs left after a capacity. The host waits for the device once, for these numbers.
    ``equal_tokens`` avoids this wait.

    Args:
        ranks: connects ranks with different prototypes.
        inner: brings the tokens to the experts of this rank's prototypes.
        pairs_per_token: the number of pairs of each token on this rank.
        equal_tokens: a promise of the caller: all ranks always bring the same number of tokens and drop no pair.

    Raises:
        ValueError: on a call, if the number of pairs contradicts the promise.
    """

    def __init__(self, ranks: Collectives, inner: Exchange, pairs_per_token: int, equal_tokens: bool = False) -> None:
        self.ranks, self.inner, self.traffic = ranks, inner, ranks.traffic
        self.num_hops = inner.num_hops + 1
        self.pairs_per_token, self.equal_tokens = pairs_per_token, equal_tokens

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """See ``Exchange``."""
        size, num_tokens = self.ranks.size, len(tokens)
        counts = routing.counts.view(size, -1)
        if self.equal_tokens:
            num_pairs = len(routing.tokens)
            if num_pairs != num_tokens * self.pairs_per_token:
                raise ValueError(
                    f"equal_tokens was promised, but {num_tokens} tokens have {num_pairs} pairs; "
                    f"expected {self.pairs_per_token} each, so set no capacity"
                )
            each = [num_pairs // size] * size
            pairs, longest = _Pairs(self.ranks.exchange(counts).wait(), each, each), num_tokens
        else:
            pairs, rows = _exchange_counts(self.ranks, counts, torch.full((size,), num_tokens, device=counts.device))
            longest = max(rows.received)
        return self._stages(tokens, routing, experts, pairs, longest)

    def _stages(
        self, tokens: Tensor, routing: Routing, experts: Experts, pairs: "_Pairs", longest: int
    ) -> StagedForward:
        num_tokens = len(tokens)
        local = _PendingPairs(self.ranks, routing, routing.tokens, pairs)
        padded = nn.functional.pad(tokens, (0, 0, 0, longest - num_tokens)) if longest > num_tokens else tokens
        pending = self.ranks.all_gather(padded)
        del padded
        yield
        first_rows = torch.arange(self.ranks.size, device=routing.tokens.device) * longest
        output = yield from self.inner.staged_forward(pending.wait(), local.wait(first_rows), experts)
        pending = self.ranks.reduce_scatter(output)
        del output
        yield
        return pending.wait()[:num_tokens]


class HierarchicalExchange:
    """Sends every token once to each node with experts for it; an inner exchange distributes it there.

    The node sums the token's outputs, so one row goes back. The host waits for the device once.

    Args:
        ranks: connects the ranks with the same position in their nodes.
        inner: the exchange among the ranks of a node.
    """

    def __init__(self, ranks: Collectives, inner: Exchange) -> None:
        self.ranks, self.inner, self.traffic = ranks, inner, ranks.traffic
        self.num_hops = inner.num_hops + 1

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """See ``Exchange``."""
        size, num_tokens = self.ranks.size, len(tokens)
        counts = routing.counts.view(size, -1)
        nodes = _sources(counts.sum(1), len(routing.tokens))
        # One row for each existing pair (node, token), sorted by node and then by token.
        keys = nodes * num_tokens + routing.tokens
        occurs = counts.new_zeros(size * num_tokens).index_fill(0, keys, 1)
        rows_per_node = occurs.view(size, num_tokens).sum(1)
        pairs, rows = _exchange_counts(self.ranks, counts, rows_per_node)
        row_of_pair = (occurs.cumsum(0) - 1)[keys]
        token_of_row = routing.tokens.new_empty(sum(rows.sent)).index_copy(0, row_of_pair, routing.tokens)
        first_sent = rows_per_node.cumsum(0) - rows_per_node
        positions = row_of_pair - first_sent[nodes]
        return self._stages(tokens, routing, experts, pairs, rows, token_of_row, positions)

    def _stages(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        pairs: "_Pairs",
        rows: "_Rows",
        token_of_row: Tensor,
        positions: Tensor,
    ) -> StagedForward:
        local = _PendingPairs(self.ranks, routing, positions, pairs)
        sums = tokens.index_select(0, token_of_row)
        pending = self.ranks.all_to_all(sums, rows.sent, rows.received, to_experts=True)
        del sums
        yield
        sums = yield from self.inner.staged_forward(pending.wait(), local.wait(rows.first_received), experts)
        pending = self.ranks.all_to_all(sums, rows.received, rows.sent, to_experts=False)
        del sums
        yield
        sums = pending.wait().to(routing.gates.dtype)
        return sums.new_zeros(len(tokens), sums.shape[1]).index_add(0, token_of_row, sums).to(tokens.dtype)


class _Pairs(NamedTuple):
    """The numbers of pairs sent between ranks. The lists have one entry for each rank.

    Attributes:
        received_counts: [n, E / n] pairs from each rank for each of this rank's experts.
        sent: pairs from this rank to each rank.
        received: pairs from each rank to this one.
    """

    received_counts: Tensor
    sent: list[int]
    received: list[int]


class _Rows(NamedTuple):
    """The numbers of token rows sent between ranks. The lists have one entry for each rank.

    Attributes:
        first_received: [n] the index of each rank's first row among the received rows.
        sent: rows from this rank to each rank.
        received: rows from each rank to this one.
    """

    first_received: Tensor
    sent: list[int]
    received: list[int]


def _exchange_counts(ranks: Collectives, counts: Tensor, num_rows: Tensor) -> tuple[_Pairs, _Rows]:
    """Exchanges the counts of pairs (for each expert) and of rows between all ranks, before the data.

    Args:
        counts: [n, E / n] this rank's pairs for each rank's experts.
        num_rows: [n] this rank's rows for each rank.
    """
    reply = ranks.exchange(torch.cat((counts, num_rows[:, None]), 1)).wait()
    received_counts, received_rows = reply[:, :-1], reply[:, -1]
    totals = torch.stack((counts.sum(1), received_counts.sum(1), num_rows, received_rows))
    sent_pairs, received_pairs, sent_rows, rows = totals.tolist()
    first_received = received_rows.cumsum(0) - received_rows
    return _Pairs(received_counts, sent_pairs, received_pairs), _Rows(first_received, sent_rows, rows)


class _PendingPairs:
    """Pairs in flight to the ranks of their experts. They start before the rows, because rows take longer.

    Args:
        routing: the pairs of this rank's tokens.
        positions: [R] the index of each pair's row among this rank's rows for the same destination.
        pairs: the number of pairs for each destination.
    """

    def __init__(self, ranks: Collectives, routing: Routing, positions: Tensor, pairs: _Pairs) -> None:
        self._pairs = pairs
        # Gates and their gradients are few numbers, and rounding them would change the outputs' weights.
        self._gates = ranks.exchange_exactly(routing.gates[:, None], pairs.sent, pairs.received)
        self._rows = ranks.exchange(positions.int(), pairs.sent, pairs.received)

    def wait(self, first_rows: Tensor) -> Routing:
        """Waits for the pairs of this rank's experts, and sorts them by expert and then by source rank.

        Args:
            first_rows: [n] the index of each source rank's first row on this rank.
        """
        counts, gates = self._pairs.received_counts, self._gates.wait().squeeze(1)
        rows = self._rows.wait() + first_rows[_sources(counts.sum(1), len(gates))]
        order = _order_by_expert(counts, len(gates))
        return Routing(tokens=rows[order], gates=gates[order], counts=counts.sum(0))


def _sources(counts: Tensor, total: int) -> Tensor:
    """Returns the group number of each item, [total]; ``counts`` [n] has the sizes of n groups."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=total)


def _order_by_expert(received_counts: Tensor, total: int) -> Tensor:
    """Returns the permutation from pairs sorted by source, then expert, to pairs sorted by expert, then source."""
    size, num_local_experts = received_counts.shape
    experts = torch.arange(num_local_experts, device=received_counts.device).repeat(size)
    return experts.repeat_interleave(received_counts.reshape(-1), output_size=total).argsort(stable=True)
