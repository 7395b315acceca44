"""Experts with weights on the device only while their chunk is in use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.memory.layout import Chunk


class WeightProvider(Protocol):
    """The part of a runtime needed by experts; see ``OffloadRuntime``."""

    def chunks_of(self, stack: str) -> list[Chunk]:
        """Returns a stack's chunks."""

    def hold(self, chunk: Chunk) -> AbstractContextManager[list[Tensor]]:
        """Keeps a chunk's weights on the device."""

    def begin_backward(self, chunk: Chunk) -> None:
        """Brings a chunk's weights back for its backward pass."""

    def end_backward(self, chunk: Chunk, gradients: Sequence[Tensor]) -> None:
        """Takes a chunk's gradients after its backward pass."""


class StreamedExperts(nn.Module):
    """Applies a stack of experts chunk by chunk, so a layer may be larger than the device.

    Autograd's graph is the same as with resident weights. Autograd saves views of the chunk's storage, and the storage
    has the weights again before the chunk's backward pass begins. So both kinds of activation checkpointing work. The
    gradients go to the runtime, and the module has no parameters.

    The host waits for the device once in each call, to split the rows.

    Args:
        compute: computes [R, D] from rows [R, D] sorted by expert, counts [N] and the weights [N, ...]; it also gets
            the keyword argument ``row_values`` if ``forward`` does.
        runtime: has the weights.
        stack: the name of the stack.
    """

    def __init__(self, compute: Callable[..., Tensor], runtime: WeightProvider, stack: str) -> None:
        super().__init__()
        self._compute, self._runtime = compute, runtime
        self._chunks = runtime.chunks_of(stack)
        self._anchor = torch.zeros(
            (), requires_grad=True
        )  # an input with a gradient: without one, autograd would not record _Enter

    def forward(self, rows: Tensor, counts: Tensor, row_values: Tensor | None = None) -> Tensor:
        """Applies each expert to its rows.

        Args:
            rows: [R, D] sorted by expert.
            counts: [E] int64, the number of rows of each expert; the sum is R.
            row_values: [R, ...] other values of the rows, such as a dropout mask. They must not depend on the chunks.

        Returns:
            [R, D].
        """
        bounds = [0, *(chunk.first_expert + chunk.num_experts for chunk in self._chunks)]
        # One transfer for all chunks' row counts.
        ends = [0, *counts.cumsum(0)[torch.tensor(bounds[1:], device=counts.device) - 1].tolist()]
        outputs = []
        for chunk, (begin, end) in zip(self._chunks, itertools.pairwise(ends), strict=True):
            own = counts[chunk.first_expert : chunk.first_expert + chunk.num_experts]
            extra = {} if row_values is None else {"row_values": row_values[begin:end]}
            with self._runtime.hold(chunk) as weights:
                entered = _Enter.apply(self._anchor, self._runtime, chunk, weights)
                output = self._compute(rows[begin:end], own, *entered, **extra)
                outputs.append(_Leave.apply(output, self._runtime, chunk))
        return torch.cat(outputs)


class _Enter(torch.autograd.Function):
    """Adds a chunk's weights to the graph. Its backward pass gets their gradients, after the chunk's backward pass."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, runtime: WeightProvider, chunk: Chunk, weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.runtime, ctx.chunk = runtime, chunk
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.runtime.end_backward(ctx.chunk, gradients)
        return None, None, None, None


class _Leave(torch.autograd.Function):
    """Does nothing in the forward pass. Its backward pass runs first of all in the chunk's backward pass."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, runtime: WeightProvider, chunk: Chunk) -> Tensor:
        ctx.runtime, ctx.chunk = runtime, chunk
        return output.view_as(output)  # a new tensor, made by this function

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.runtime.begin_backward(ctx.chunk)
        return gradients[0], None, None
