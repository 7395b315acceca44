"""The search of the chunk size."""

from types import SimpleNamespace

import pytest
import torch

from offload.devices.device import Rates
from offload.memory.layout import Stack
from offload.optimizer.settings import OptimizerSettings
from offload.plan import chunk_size
from offload.plan.chunk_size import search_chunk_bytes
from offload.plan.trace import Moment, Trace


def zigzag(num_chunks: int, nonmodel_bytes: list[int], recompute: bool = False) -> Trace:
    """Forward through all chunks and back, as a Transformer does."""
    order = [*range(num_chunks), *reversed(range(num_chunks))]
    moments = [Moment(chunk, time >= num_chunks, (), nonmodel_bytes[time]) for time, chunk in enumerate(order)]
    if recompute:
        moments[num_chunks:] = [
            moment
            for back in moments[num_chunks:]
            for moment in (Moment(back.chunk, False, (), back.nonmodel_bytes), back)
        ]
    return Trace(tuple(moments), nonmodel_bytes[-1])


def test_chunks_are_large_unless_the_window_would_not_fit():
    """Each copy has a cost, so chunks are large, unless a window of large ones does not fit."""
    stacks = [Stack(f"layer_{number}", 8, {"w": (64, 64)}) for number in range(4)]
    trace = zigzag(4, [0] * 8)
    expert_bytes = 2 * 64 * 64

    def search(budget: int) -> int:
        return search_chunk_bytes(
            stacks,
            trace,
            budget,
            dtype=torch.bfloat16,
            gradient_dtype=torch.bfloat16,
            optimizer=OptimizerSettings(),
            prefetch_depth=1,
            rates=Rates(),
        )

    assert search(10**9) == 8 * expert_bytes  # all is owned: the fewest pieces
    assert search(4 * expert_bytes) == expert_bytes
    assert search(1) == expert_bytes, "too small for anything: what is smallest, and others say that it is too small"


def test_of_sizes_that_move_as_much_the_one_with_the_fewest_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = [Stack("layer", 6, {"w": (64, 64)})]
    moved = SimpleNamespace(upload_bytes=10**6, download_bytes=10**6, moved_bytes=2 * 10**6)
    monkeypatch.setattr(chunk_size, "solve", lambda *_: moved)
    settings = dict(dtype=torch.float32, gradient_dtype=torch.float32, optimizer=OptimizerSettings(), prefetch_depth=1)
    assert search_chunk_bytes(stacks, zigzag(1, [0, 0]), 10**6, rates=Rates(), **settings) == 6 * 4 * 64 * 64
