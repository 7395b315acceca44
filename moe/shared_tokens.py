"""Ranks that have the same tokens: each brings a part of them to the experts, and all get all outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe.dispatch import Dispatcher, Trip
from moe.experts import Experts
from moe.routing import Routing


class SharedTokensDispatcher:
    """The dispatcher of ranks that call a layer with the same tokens, such as those of a tensor group.

    Each rank routes all tokens, so that capacities, losses and statistics are those of one rank. It exchanges and
    computes a part of the tokens alone: P parts of equal numbers for P ranks. Their outputs are gathered.

    What comes before the layer is equal on all ranks and gets equal gradients; the gradient of an expert is that of
    this rank's part, and their sum over the ranks is that of all tokens.

    Args:
        inner: brings a part of the tokens to the experts. Its traffic is that of this object: what the ranks gather is
            not counted.
        group: the ranks with the same tokens.
    """

    def __init__(self, inner: Dispatcher, group: ProcessGroup) -> None:
        self.inner, self.group, self.traffic = inner, group, inner.traffic

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        beside: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``; ``beside`` gets all tokens on each rank."""
        part = _Part.of(len(tokens), self.group)
        own = self.inner(*self._own(tokens, routing, part), experts)
        added = None if beside is None else beside(tokens)
        output: Tensor = _Gathered.apply(own, part)
        return output if added is None else output + added

    def trip(self, tokens: Tensor, routing: Routing, experts: Experts) -> Trip:
        """See ``Dispatcher``."""
        part = _Part.of(len(tokens), self.group)
        own = yield from self.inner.trip(*self._own(tokens, routing, part), experts)
        output: Tensor = _Gathered.apply(own, part)
        return output

    def _own(self, tokens: Tensor, routing: Routing, part: "_Part") -> tuple[Tensor, Routing]:
        gates: Tensor = _SumOfGradients.apply(routing.gates, self.group)
        return _Taken.apply(tokens, part), pairs_of_tokens(routing._replace(gates=gates), part.begin, part.end)


def pairs_of_tokens(routing: Routing, begin: int, end: int) -> Routing:
    """The pairs of the tokens from ``begin`` to ``end``, which are counted from 0; the host waits for the device."""
    inside = (routing.tokens >= begin) & (routing.tokens < end)
    places = inside.nonzero().squeeze(1)
    before = torch.nn.functional.pad(inside.cumsum(0), (1, 0))  # pairs inside before each place
    ends = routing.counts.cumsum(0)
    counts = before[ends] - before[ends - routing.counts]
    return Routing(routing.tokens[places] - begin, routing.gates.index_select(0, places), counts)


class _Part:
    """A rank's range of tokens, the same length for all but the last ones.

    Args:
        num_tokens: of all ranks.
        group: the ranks.
        place: of this rank in the group.
        num_ranks: of the group.
    """

    def __init__(self, num_tokens: int, group: ProcessGroup, place: int, num_ranks: int) -> None:
        self.num_tokens, self.num_ranks, self._group = num_tokens, num_ranks, group
        self._longest = -(-num_tokens // num_ranks)
        self.begin = min(place * self._longest, num_tokens)
        self.end = min(self.begin + self._longest, num_tokens)

    @classmethod
    def of(cls, num_tokens: int, group: ProcessGroup) -> "_Part":
        return cls(num_tokens, group, torch.distributed.get_rank(group), torch.distributed.get_world_size(group))

    def gather(self, rows: Tensor) -> Tensor:
        """The rows [T, D] of all ranks."""
        padded = rows.new_zeros(self._longest, *rows.shape[1:])
        padded[: len(rows)] = rows
        found = rows.new_empty(self.num_ranks * self._longest, *rows.shape[1:])
        torch.distributed.all_gather_single(found, padded, group=self._group)
        return found[: self.num_tokens]


class _Taken(torch.autograd.Function):
    """This rank's part of rows that all ranks have; the gradient is that of all parts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: _Part) -> Tensor:
        ctx.part = part
        return rows[part.begin : part.end].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.part.gather(grads[0]), None


class _Gathered(torch.autograd.Function):
    """The rows of all parts. All ranks compute the same of them, so that each has the gradient of its part already."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, part: _Part) -> Tensor:
        ctx.part = part
        return part.gather(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.part.begin : ctx.part.end].contiguous(), None


class _SumOfGradients(torch.autograd.Function):
    """What all ranks have, and of which each uses a part; the gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None
