"""Ranks with the same tokens: each sends a part of them to the experts, and an all-gather collects the outputs."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.custom_gradient import custom_gradient, same
from moe.dispatch import Dispatcher, StagedForward
from moe.experts import Experts
from moe.routing import Routing


class SharedTokensDispatcher:
    """The dispatcher of ranks with the same tokens in every call, such as the ranks of a tensor group.

    Each rank routes all tokens, so capacities, losses and statistics are the same as on one rank. For P ranks the
    tokens are divided into P equal parts. Each rank exchanges and computes only its own part. An all-gather collects
    the outputs.

    The layer's inputs are equal on all ranks and get equal gradients. The gradient of an expert comes from this rank's
    part only; the sum over the ranks is the gradient of all tokens.

    Args:
        inner: brings a part of the tokens to the experts. ``traffic`` is the counter of ``inner``; it does not include
            the all-gather.
        group: the ranks with the same tokens.
    """

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner, self.group, self.traffic = inner, group, inner.traffic

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        concurrent: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``; ``concurrent`` gets all tokens on each rank."""
        part = _Part.of(len(tokens), self.group)
        own = self.inner(*self._own(tokens, routing, part), experts)
        added = None if concurrent is None else concurrent(tokens)
        output = part.gathered(own)
        return output if added is None else output + added

    def staged_forward(self, tokens: Tensor, routing: Routing, experts: Experts) -> StagedForward:
        """See ``Dispatcher``."""
        part = _Part.of(len(tokens), self.group)
        own = yield from self.inner.staged_forward(*self._own(tokens, routing, part), experts)
        return part.gathered(own)

    def _own(self, tokens: Tensor, routing: Routing, part: "_Part") -> tuple[Tensor, Routing]:
        # All ranks have the gates, and each uses a part of them.
        gates = custom_gradient(routing.gates, same, self._sum)
        return part.taken(tokens), pairs_of_tokens(routing._replace(gates=gates), part.begin, part.end)

    def _sum(self, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=self.group)
        return total


def pairs_of_tokens(routing: Routing, begin: int, end: int) -> Routing:
    """Returns the pairs of the tokens from ``begin`` to ``end``, renumbered from 0. The host waits for the device."""
    inside = (routing.tokens >= begin) & (routing.tokens < end)
    places = inside.nonzero().squeeze(1)
    before = torch.nn.functional.pad(inside.cumsum(0), (1, 0))  # number of pairs inside the range before each index
    ends = routing.counts.cumsum(0)
    counts = before[ends] - before[ends - routing.counts]
    return Routing(routing.tokens[places] - begin, routing.gates.index_select(0, places), counts)


class _Part:
    """A rank's range of tokens. All ranges have the same length except the last, which may be shorter or empty.

    Args:
        num_tokens: the number of tokens of all ranges.
        group: the ranks.
        place: the number of this rank in the group.
        num_ranks: the size of the group.
    """

    def __init__(self, num_tokens: int, group: ProcessGroup, place: int, num_ranks: int) -> None:
        self.num_tokens, self.num_ranks, self._group = num_tokens, num_ranks, group
        self._longest = -(-num_tokens // num_ranks)
        self.begin = min(place * self._longest, num_tokens)
        self.end = min(self.begin + self._longest, num_tokens)

    @classmethod
    def of(cls, num_tokens: int, group: ProcessGroup) -> "_Part":
        return cls(num_tokens, group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    def taken(self, rows: Tensor) -> Tensor:
        """Returns this rank's part of the rows of all ranks. The backward pass gathers the gradients of all parts."""
        return custom_gradient(rows, lambda rows: rows[self.begin : self.end].clone(), self._gather)

    def gathered(self, rows: Tensor) -> Tensor:
        """Returns the rows [T, D] of all parts. All ranks compute the same from them, and have the same gradients."""
        return custom_gradient(rows, self._gather, lambda rows: rows[self.begin : self.end].contiguous())

    def _gather(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(self._longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        found = rows.new_empty(self.num_ranks * self._longest, *rows.shape[1:])
        torch.distributed.all_gather_single(found, padded, group=self._group)
        return found[: self.num_tokens]
