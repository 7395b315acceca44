"""Searches how many experts to move at a time: few copies, but a small window and little that does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from offload.chunks import Chunk, Stack, lay_out
from offload.device import Rates
from offload.plan import solve
from offload.sizes import sizes_of
from offload.timeline import LATENCY_S
from offload.trace import Trace
from offload.update import OptimizerSettings

_MAX_CHUNKS = 512  # beyond, a plan takes longer than a few seconds


def search_chunk_bytes(
    stacks: Sequence[Stack],
    trace: Trace,
    budget_bytes: int,
    *,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype | None,
    optimizer: OptimizerSettings,
    prefetch_depth: int,
    rates: Rates,
) -> int:
    """The size whose plan spends the least time on copies; of equal ones the largest.

    Args:
        trace: with one chunk for each stack.

    Returns:
        ``chunk_bytes`` for ``cut``: that of one expert where no plan meets the budget.
    """
    expert_bytes = max(stack.expert_size for stack in stacks) * dtype.itemsize
    most = max(stack.num_experts for stack in stacks)
    best: tuple[float, int] = (float("inf"), expert_bytes)
    for power in range((most - 1).bit_length() + 1):
        num_experts = min(2**power, most)
        laid_out = lay_out(stacks, num_experts * expert_bytes, dtype, gradient_dtype, optimizer)
        if len(laid_out) > max(_MAX_CHUNKS, len(stacks)):
            continue
        sizes = sizes_of(laid_out)
        finer = _refine(trace, [chunk for chunk, _ in laid_out], stacks)
        try:
            plan = solve(finer, sizes, budget_bytes, prefetch_depth, rates)
        except ValueError:
            break  # larger ones fit even less
        largest = max(size.weight for size in sizes)
        num_copies = plan.moved_bytes / largest
        seconds = plan.upload_bytes / rates.upload + plan.download_bytes / rates.download + LATENCY_S * num_copies
        if seconds <= best[0]:
            best = (seconds, num_experts * expert_bytes)
    return best[1]


def _refine(trace: Trace, chunks: Sequence[Chunk], stacks: Sequence[Stack]) -> Trace:
    """Every use of a stack as uses of its chunks: in order, and in the reverse order where gradients come out."""
    own = {number: [chunk.number for chunk in chunks if chunk.stack is stack] for number, stack in enumerate(stacks)}
    moments = []
    for moment in trace.moments:
        numbers = own[moment.chunk]
        pinned = tuple(itertools.chain.from_iterable(own[number][:1] for number in moment.pinned))
        for number in reversed(numbers) if moment.backward else numbers:
            moments.append(replace(moment, chunk=number, pinned=pinned, seconds=moment.seconds / len(numbers)))
    return Trace(tuple(moments), trace.outside_bytes)
