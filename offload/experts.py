"""Experts whose weights are on the device only while a group of them computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.chunks import Chunk
from offload.runtime import OffloadRuntime


class StreamedExperts(nn.Module):
    """Applies a stack of experts chunk by chunk, so that a layer may be larger than the device.

    Autograd's graph is that of the same computation on resident weights: what it saves are views of the chunk's one
    storage, which is filled again before the chunk's backward pass begins. So it works under activation
    checkpointing of either kind. The gradients go to the runtime; the module has no parameters.

    Splitting the rows waits for the device once a call.

    Args:
        compute: (rows [R, D] sorted by expert, counts [N], weights [N, ., .] ...) -> [R, D].
        runtime: holds the weights.
        stack: the name there.
    """

    def __init__(self, compute: Callable[..., Tensor], runtime: OffloadRuntime, stack: str) -> None:
        super().__init__()
        self._compute, self._runtime = compute, runtime
        self._chunks = runtime.chunks_of(stack)
        self._anchor = torch.zeros((), requires_grad=True)  # makes autograd record the entry of weights

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """
        Args:
            rows: [R, D] sorted by expert.
            counts: [E] int64 rows of each expert; sums to R.

        Returns:
            [R, D].
        """
        bounds = [0, *(chunk.first_expert + chunk.num_experts for chunk in self._chunks)]
        ends = [0, *counts.cumsum(0)[torch.tensor(bounds[1:], device=counts.device) - 1].tolist()]
        pieces = rows.split([end - begin for begin, end in itertools.pairwise(ends)])
        outputs = [
            self._apply_chunk(chunk, piece, counts[chunk.first_expert : chunk.first_expert + chunk.num_experts])
            for chunk, piece in zip(self._chunks, pieces, strict=True)
        ]
        return torch.cat(outputs)

    def _apply_chunk(self, chunk: Chunk, rows: Tensor, counts: Tensor) -> Tensor:
        with self._runtime.hold(chunk) as weights:
            entered = _Enter.apply(self._anchor, self._runtime, chunk, weights)
            output: Tensor = _Leave.apply(self._compute(rows, counts, *entered), self._runtime, chunk)
            return output


class _Enter(torch.autograd.Function):
    """Weights come into the graph here; so their gradients come out here, after the chunk's backward pass."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, runtime: OffloadRuntime, chunk: Chunk, weights: Sequence[Tensor]
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
    def forward(ctx: Any, output: Tensor, runtime: OffloadRuntime, chunk: Chunk) -> Tensor:
        ctx.runtime, ctx.chunk = runtime, chunk
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.runtime.begin_backward(ctx.chunk)
        return gradients[0], None, None
