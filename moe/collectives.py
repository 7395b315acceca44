"""Asynchronous, differentiable collectives among the ranks of a group, with a count of the bytes sent."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from moe.config import DispatchDtype
from moe.dispatch_dtype import CODECS, IDENTITY, Codec


@dataclass
class Traffic:
    """Bytes passed by this rank to collectives for other ranks. The route of the collective does not matter.

    Attributes:
        bytes_within_nodes: bytes to ranks of the same node; all bytes if ``ranks_per_node`` is None.
        bytes_between_nodes: bytes to ranks of other nodes.
    """

    bytes_within_nodes: int = 0
    bytes_between_nodes: int = 0


class Collectives:
    """The collectives of dispatchers, in one process group.

    Args:
        group: a group with this rank.
        dispatch_dtype: the number format of rows in flight, see ``moe.dispatch_dtype``. Autograd ignores the rounding.
        ranks_per_node: the number of neighbouring ranks on a node; None: all ranks are on one node.
        traffic: the counter to use; several objects may share it. None: a new counter.

    Attributes:
        size: the number of ranks in the group.
        traffic: the counter.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        dispatch_dtype: DispatchDtype = "same",
        ranks_per_node: int | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.group = group
        self.size = torch.distributed.get_world_size(group)
        self.traffic = Traffic() if traffic is None else traffic
        self._to_experts, self._from_experts = CODECS[dispatch_dtype]
        own, ranks = torch.distributed.get_rank(), torch.distributed.get_process_group_ranks(group)
        nodes = [0 if ranks_per_node is None else rank // ranks_per_node for rank in ranks]
        self._own = ranks.index(own)
        self._same_node = [node == nodes[self._own] for node in nodes]

    def exchange(
        self, values: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> "PendingCollective":
        """Starts an all-to-all of ``values``, split along dimension 0. The result has no gradient.

        Args:
            values: [N, ...] sorted by destination.
            sent, received: the number of entries to and from each rank; None: equal numbers.

        Returns:
            The pending collective; its ``wait`` returns the received values, sorted by source.
        """
        return self._all_to_all(values.detach(), sent, received, IDENTITY)

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int], *, to_experts: bool) -> "PendingExchange":
        """Starts an all-to-all of rows.

        Args:
            rows: [sum(sent), D] sorted by destination.
            sent, received: the number of rows to and from each rank.
            to_experts: True for dispatch, False for combine. The number format depends on it.

        Returns:
            The pending exchange; its ``wait`` returns [sum(received), D] sorted by source.
        """
        codec, gradient_codec = self._codecs(to_experts)
        return PendingExchange(
            rows,
            lambda rows: self._all_to_all(rows, sent, received, codec),
            lambda grads: self._all_to_all(grads, received, sent, gradient_codec),
        )

    def exchange_exactly(self, rows: Tensor, sent: list[int], received: list[int]) -> "PendingExchange":
        """Starts an ``all_to_all`` in the rows' own number format."""
        return PendingExchange(
            rows,
            lambda rows: self._all_to_all(rows, sent, received, IDENTITY),
            lambda grads: self._all_to_all(grads, received, sent, IDENTITY),
        )

    def all_gather(self, rows: Tensor) -> "PendingExchange":
        """Starts an all-gather of rows [T, D] for dispatch; T is the same on all ranks.

        Returns:
            The pending exchange; its ``wait`` returns [size * T, D] sorted by source.
        """
        codec, gradient_codec = self._codecs(to_experts=True)
        return PendingExchange(
            rows, lambda rows: self._all_gather(rows, codec), lambda grads: self._sum_scatter(grads, gradient_codec)
        )

    def reduce_scatter(self, rows: Tensor) -> "PendingExchange":
        """Starts a reduce-scatter of rows [size * T, D] for combine.

        Returns:
            The pending exchange; its ``wait`` returns [T, D], the sum of all ranks' rows for this rank.
        """
        codec, gradient_codec = self._codecs(to_experts=False)
        return PendingExchange(
            rows, lambda rows: self._sum_scatter(rows, codec), lambda grads: self._all_gather(grads, gradient_codec)
        )

    def _codecs(self, to_experts: bool) -> tuple[Codec, Codec]:
        """Returns the codecs of rows and of their gradients. Gradients travel in the opposite direction."""
        pair = (self._to_experts, self._from_experts)
        return pair if to_experts else pair[::-1]

    def _all_to_all(
        self, rows: Tensor, sent: list[int] | None, received: list[int] | None, codec: Codec
    ) -> "PendingCollective":
        encoded = codec.encode(rows)
        buffer = encoded.new_empty((len(rows) if received is None else sum(received), *encoded.shape[1:]))
        work = torch.distributed.all_to_all_single(buffer, encoded, received, sent, group=self.group, async_op=True)
        # Counted here and not on arrival: each rank counts only what it sends.
        self._count([len(rows) // self.size] * self.size if sent is None else sent, encoded)
        return PendingCollective(work, buffer, lambda buffer: codec.decode(buffer, rows.dtype))

    def _all_gather(self, rows: Tensor, codec: Codec) -> "PendingCollective":
        encoded = codec.encode(rows)
        buffer = encoded.new_empty(self.size * len(encoded), *encoded.shape[1:])
        work = torch.distributed.all_gather_single(buffer, encoded, group=self.group, async_op=True)
        self._count([len(rows)] * self.size, encoded)
        return PendingCollective(work, buffer, lambda buffer: codec.decode(buffer, rows.dtype))

    def _sum_scatter(self, rows: Tensor, codec: Codec) -> "PendingCollective":
        if codec is IDENTITY and rows.itemsize > 2:
            rows = rows.contiguous()
            buffer = rows.new_empty(len(rows) // self.size, *rows.shape[1:])
            work = torch.distributed.reduce_scatter_single(buffer, rows, group=self.group, async_op=True)
            self._count([len(buffer)] * self.size, rows)
            return PendingCollective(work, buffer, lambda buffer: buffer)
        # A reduce-scatter would round to 16 or 8 bits after each addition. This sends as many bytes and rounds once:
        # PyTorch sums 16-bit numbers in float32.
        moved = self._all_to_all(rows, None, None, codec)
        parts = (self.size, len(rows) // self.size, *rows.shape[1:])
        return PendingCollective(moved.work, moved.buffer, lambda buffer: moved.decode(buffer).view(parts).sum(0))

    def _count(self, rows_per_rank: list[int], encoded: Tensor) -> None:
        """Adds the bytes of a collective with ``rows_per_rank`` rows of ``encoded`` for each rank."""
        row_bytes = math.prod(encoded.shape[1:]) * encoded.element_size()
        for rank, (rows, near) in enumerate(zip(rows_per_rank, self._same_node, strict=True)):
            if rank == self._own:
                continue
            if near:
                self.traffic.bytes_within_nodes += rows * row_bytes
            else:
                self.traffic.bytes_between_nodes += rows * row_bytes


class PendingCollective(NamedTuple):
    """A started collective, and the function that decodes its result."""

    work: torch.distributed.Work
    buffer: Tensor
    decode: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """Waits for the collective and returns its decoded result; on a GPU the stream waits and the host does not."""
        self.work.wait()
        return self.decode(self.buffer)


class PendingExchange:
    """A started, differentiable exchange of rows.

    Computation between the start and ``wait`` overlaps with the exchange. In the backward pass the exchange of
    the gradients starts where ``wait`` was called and ends where the forward exchange started, because autograd runs
    backwards. It therefore overlaps with the backward pass of the same computation.

    Args:
        rows: the rows to send.
        forward: starts the exchange of rows.
        backward: starts the exchange of gradients.
    """

    def __init__(
        self,
        rows: Tensor,
        forward: Callable[[Tensor], PendingCollective],
        backward: Callable[[Tensor], PendingCollective],
    ) -> None:
        self._exchange = _Exchange(forward, backward)
        self._token = _Start.apply(rows, self._exchange)

    def wait(self) -> Tensor:
        """Waits for the exchange and returns the received rows."""
        return _Finish.apply(self._token, self._exchange)


class _Exchange:
    """The shared state of ``_Start`` and ``_Finish``.

    Autograd connects the two by a tensor without elements, since the rows do not exist while they are being exchanged.
    """

    def __init__(
        self, forward: Callable[[Tensor], PendingCollective], backward: Callable[[Tensor], PendingCollective]
    ) -> None:
        self.forward, self.backward = forward, backward
        self._pending: PendingCollective | None = None

    def start(self, collective: Callable[[Tensor], PendingCollective], rows: Tensor) -> Tensor:
        self._pending = collective(rows)
        return rows.new_empty(0)

    def finish(self) -> Tensor:
        assert self._pending is not None
        rows, self._pending = self._pending.wait(), None
        return rows


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(exchange.forward, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.finish(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.start(ctx.exchange.backward, grads[0]), None
