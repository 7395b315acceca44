"""Experts whose weights are on the device only while a group of them computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.chunks import Chunk


class Holder(Protocol):
    """What experts ask of a runtime; see ``OffloadRuntime``."""

    def chunks_of(self, stack: str) -> list[Chunk]: ...

    def hold(self, chunk: Chunk) -> AbstractContextManager[list[Tensor]]: ...

    def begin_backward(self, chunk: Chunk) -> None: ...

    def end_backward(self, chunk: Chunk, gradients: Sequence[Tensor]) -> None: ...


class StreamedExperts(nn.Module):
    """Applies a stack of experts chunk by chunk, so that a layer may be larger than the device.

    Autograd's graph is that of the same computation on resident weights: what it saves are views of the chunk's one
    storage, which is filled again before the chunk's backward pass begins. So it works under activation
    checkpointing of either kind. The gradients go to the runtime; the module has no parameters.

    Splitting the rows waits for the device once a call.

    Args:
        compute: (rows [R, D] sorted by expert, counts [N], weights [N, ...] ...) -> [R, D]; takes ``row_values``, too,
            where they are given.
        runtime: holds the weights.
        stack: the name there.
    """

    def __init__(self, compute: Callable[..., Tensor], runtime: Holder, stack: str) -> None:
        super().__init__()
        self._compute, self._runtime = compute, runtime
        self._chunks = runtime.chunks_of(stack)
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd record the entry of weights

    def forward(self, rows: Tensor, counts: Tensor, row_values: Tensor | None = None) -> Tensor:
        """
        Args:
            rows: [R, D] sorted by expert.
            counts: [E] int64 rows of each expert; sums to R.
            row_values: [R, ...] what else belongs to the rows, as a mask for dropout that must not depend on chunks.

        Returns:
            [R, D].
        """
        bounds = [0, *(chunk.first_expert + chunk.num_experts for chunk in self._chunks)]
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
    """Weights come into the graph here; so their gradients come out here, after the chunk's backward pass."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, runtime: Holder, chunk: Chunk, weights: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.runtime, ctx.chunk = runtime, chunk
        return tuple(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.runtime.end_backward(ctx.chunk, gradients)
        return None, None, None, None


class _Leave(torch.autograd.Function):
    """The backward pass of a chunk begins here."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, runtime: Holder, chunk: Chunk) -> Tensor:
        ctx.runtime, ctx.chunk = runtime, chunk
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.runtime.begin_backward(ctx.chunk)
        return gradients[0], None, None
