"""Searches the chunk size: large chunks need few copies, small ones a small window and leave less memory unused."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from offload.devices.device import Rates
from offload.memory.layout import Chunk, NextWeights, Stack, lay_out, sizes_of
from offload.optimizer.settings import OptimizerSettings
from offload.plan.solver import solve
from offload.plan.timeline import LATENCY_S
from offload.plan.trace import Trace

_MAX_CHUNKS = 512  # with more chunks the solver takes longer than a few seconds


def search_chunk_bytes(
    stacks: Sequence[Stack],
    trace: Trace,
    budget_bytes: int,
    *,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype | None,
    optimizer: OptimizerSettings,
    next_weights: NextWeights | None = None,
    prefetch_depth: int,
    rates: Rates,
) -> int:
    """Returns the chunk size with the least time for copies in its plan; of equally good sizes the largest.

    Args:
        stacks: the experts to divide into chunks.
        trace: a step in which each stack is one chunk.
        budget_bytes: the device's budget.
        dtype, gradient_dtype, optimizer, next_weights: see ``OffloadRuntime``.
        prefetch_depth, rates: see ``solve``.

    Returns:
        ``chunk_bytes`` for ``cut``; the size of one expert if no plan meets the budget.
    """
    expert_bytes = max(stack.expert_size for stack in stacks) * dtype.itemsize
    most = max(stack.num_experts for stack in stacks)
    best: tuple[float, int] = (float("inf"), expert_bytes)
    for power in range((most - 1).bit_length() + 1):
        num_experts = min(2**power, most)
        laid_out = lay_out(stacks, num_experts * expert_bytes, dtype, gradient_dtype, optimizer, next_weights)
        if len(laid_out) > max(_MAX_CHUNKS, len(stacks)):
            continue
        sizes = sizes_of(laid_out)
        finer = _refine(trace, [chunk for chunk, _ in laid_out], stacks)
        try:
            plan = solve(finer, sizes, budget_bytes, prefetch_depth, rates)
        except ValueError:
            break  # larger chunks need a larger window, so they do not fit either
        largest = max(size.weight for size in sizes)
        num_copies = plan.moved_bytes / largest  # an estimate: most chunks are about as large as the largest
        seconds = plan.upload_bytes / rates.upload + plan.download_bytes / rates.download + LATENCY_S * num_copies
        if seconds <= best[0]:
            best = (seconds, num_experts * expert_bytes)
    return best[1]


def _refine(trace: Trace, chunks: Sequence[Chunk], stacks: Sequence[Stack]) -> Trace:
    """Replaces each use of a stack by uses of its chunks: in order, and in reverse order in the backward pass."""
    own = {number: [chunk.number for chunk in chunks if chunk.stack is stack] for number, stack in enumerate(stacks)}
    moments = []
    for moment in trace.moments:
        numbers = own[moment.chunk]
        pinned = tuple(itertools.chain.from_iterable(own[number][:1] for number in moment.pinned))
        for number in reversed(numbers) if moment.backward else numbers:
            moments.append(replace(moment, chunk=number, pinned=pinned, seconds=moment.seconds / len(numbers)))
    return Trace(tuple(moments), trace.outside_bytes)
