"""Exchanges between the ranks of a group: started, waited for, differentiable, and counted in bytes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from moe.payload import CODECS, SAME, Codec, Payload


@dataclass
class SentBytes:
    """What this rank has handed to other ranks, whatever way a collective then takes.

    Attributes:
        within_nodes: to ranks of its own node; everything, where nodes are not known.
        between_nodes: to ranks of other nodes.
    """

    within_nodes: int = 0
    between_nodes: int = 0

    @property
    def total(self) -> int:
        return self.within_nodes + self.between_nodes


class Wire:
    """The ranks of a process group, joined.

    Args:
        group: this rank is in it.
        payload: the form of rows on the way, see ``moe.payload``. Rounding counts as identity for autograd.
        ranks_per_node: neighbouring ranks that make a node; None: all.
        sent_bytes: where to count, possibly together with other wires.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        payload: Payload = "same",
        ranks_per_node: int | None = None,
        sent_bytes: SentBytes | None = None,
    ) -> None:
        self.group = group
        self.size = torch.distributed.get_world_size(group)
        self.sent_bytes = SentBytes() if sent_bytes is None else sent_bytes
        self._to_experts, self._from_experts = CODECS[payload]
        own, ranks = torch.distributed.get_rank(), torch.distributed.get_process_group_ranks(group)
        nodes = [0 if ranks_per_node is None else rank // ranks_per_node for rank in ranks]
        self._own = ranks.index(own)
        self._same_node = [node == nodes[self._own] for node in nodes]

    def exchange(self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None) -> Tensor:
        """Splits ``values`` along dimension 0 over the ranks and returns what they had for this one, by source.

        Equal parts unless ``sent`` and ``received`` give the sizes. Outside of autograd.
        """
        return self._all_to_all(values.detach(), sent, received, SAME).wait()

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], *, to_experts: bool) -> "Travelling":
        """[sum(sent), D] by destination -> [sum(received), D] by source."""
        go, back = self._codecs(to_experts)
        return Travelling(
            rows,
            lambda rows: self._all_to_all(rows, sent, received, go),
            lambda grads: self._all_to_all(grads, received, sent, back),
        )

    def exchange_exactly(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """``all_to_all`` at full precision whatever the payload, waited for."""
        return Travelling(
            rows,
            lambda rows: self._all_to_all(rows, sent, received, SAME),
            lambda grads: self._all_to_all(grads, received, sent, SAME),
        ).wait()

    def all_gather(self, rows: Tensor) -> "Travelling":
        """[T, D] on the way to the experts -> [size * T, D] by source; T is the same on all ranks."""
        go, back = self._codecs(to_experts=True)
        return Travelling(rows, lambda rows: self._all_gather(rows, go), lambda grads: self._sum_scatter(grads, back))

    def reduce_scatter(self, rows: Tensor) -> "Travelling":
        """[size * T, D] on the way from the experts -> [T, D], the sum of what the ranks had for this one."""
        go, back = self._codecs(to_experts=False)
        return Travelling(rows, lambda rows: self._sum_scatter(rows, go), lambda grads: self._all_gather(grads, back))

    def _codecs(self, to_experts: bool) -> tuple[Codec, Codec]:
        """For a trip and for its gradients, which go the other way."""
        pair = (self._to_experts, self._from_experts)
        return pair if to_experts else pair[::-1]

    def _all_to_all(self, rows: Tensor, sent: list[int] | None, received: list[int] | None, codec: Codec) -> "InFlight":
        encoded = codec.encode(rows)
        buffer = encoded.new_empty((len(rows) if received is None else sum(received), *encoded.shape[1:]))
        work = torch.distributed.all_to_all_single(buffer, encoded, received, sent, group=self.group, async_op=True)
        self._count([len(rows) // self.size] * self.size if sent is None else sent, encoded)
        return InFlight(work, buffer, lambda buffer: codec.decode(buffer, rows.dtype))

    def _all_gather(self, rows: Tensor, codec: Codec) -> "InFlight":
        encoded = codec.encode(rows)
        buffer = encoded.new_empty(self.size * len(encoded), *encoded.shape[1:])
        work = torch.distributed.all_gather_single(buffer, encoded, group=self.group, async_op=True)
        self._count([len(rows)] * self.size, encoded)
        return InFlight(work, buffer, lambda buffer: codec.decode(buffer, rows.dtype))

    def _sum_scatter(self, rows: Tensor, codec: Codec) -> "InFlight":
        if codec is SAME:
            rows = rows.contiguous()
            buffer = rows.new_empty(len(rows) // self.size, *rows.shape[1:])
            work = torch.distributed.reduce_scatter_single(buffer, rows, group=self.group, async_op=True)
            self._count([len(buffer)] * self.size, rows)
            return InFlight(work, buffer, lambda buffer: buffer)
        # The same bytes, but summed here in full precision.
        moved = self._all_to_all(rows, None, None, codec)
        parts = (self.size, len(rows) // self.size, *rows.shape[1:])
        return InFlight(moved.work, moved.buffer, lambda buffer: moved.arrive(buffer).view(parts).sum(0))

    def _count(self, rows_per_rank: list[int], encoded: Tensor) -> None:
        row_bytes = math.prod(encoded.shape[1:]) * encoded.element_size()
        for rank, (rows, near) in enumerate(zip(rows_per_rank, self._same_node, strict=True)):
            if rank == self._own:
                continue
            if near:
                self.sent_bytes.within_nodes += rows * row_bytes
            else:
                self.sent_bytes.between_nodes += rows * row_bytes


class InFlight(NamedTuple):
    """A collective that was started, and what to make of its result."""

    work: torch.distributed.Work
    buffer: Tensor
    arrive: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """On a GPU only its stream waits, not the host."""
        self.work.wait()
        return self.arrive(self.buffer)


class Travelling:
    """Rows that are under way until ``wait``. In the backward pass their gradients are, for as long.

    What is computed between start and ``wait`` runs beside the exchange, and its backward beside that of the
    gradients: autograd runs backwards what was recorded in between.
    """

    def __init__(self, rows: Tensor, go: Callable[[Tensor], InFlight], back: Callable[[Tensor], InFlight]) -> None:
        self._trip = _Trip(go, back)
        self._token = _Leave.apply(rows, self._trip)

    def wait(self) -> Tensor:
        return _Arrive.apply(self._token, self._trip)


class _Trip:
    """What the two halves of an exchange tell each other; autograd only sees a token of no elements between them."""

    def __init__(self, go: Callable[[Tensor], InFlight], back: Callable[[Tensor], InFlight]) -> None:
        self.go, self.back = go, back
        self._in_flight: InFlight | None = None

    def start(self, way: Callable[[Tensor], InFlight], rows: Tensor) -> Tensor:
        self._in_flight = way(rows)
        return rows.new_empty(0)

    def finish(self) -> Tensor:
        assert self._in_flight is not None
        rows, self._in_flight = self._in_flight.wait(), None
        return rows


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(trip.go, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.finish(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.finish()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.trip.start(ctx.trip.back, grads[0]), None
