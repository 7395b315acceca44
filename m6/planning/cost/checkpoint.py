"""The bytes of a checkpoint: of the file that a rank writes, and in host memory meanwhile."""

from __future__ import annotations

from m6.checkpoints.format import SHARD_BYTES
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.precision import FP32


def checkpoint_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes that one rank writes, all in fp32: weights, moments, and gradients that wait for a later step."""
    counts = memory.counts(layout).divided(layout)
    replicas = layout.dp_size // layout.ep_size
    owned = (counts.local - counts.experts) / layout.dp_size + counts.experts / replicas
    late = 0 if memory.config.m6.gradient_delay is None else FP32
    written = owned * (_state_bytes(memory.config.deepspeed.optimizer_type) + late) + memory.residual_bytes(layout)
    streamed = memory.stored_experts(layout) / layout.tp_size / replicas
    if streamed:
        written += streamed * (_state_bytes(memory.expert_store(layout).optimizer_type) + late)
    return written


def copied_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes of one rank in host memory while it writes: all that it writes, or with ``async_save: false`` one file."""
    whole = checkpoint_bytes(memory, layout)
    return whole if memory.config.m6.checkpoint.async_save else min(whole, SHARD_BYTES)


def _state_bytes(optimizer_type: str) -> int:
    """The weight, and two moments or a momentum. Adafactor's row and column means are negligible."""
    return {"AdamW": 12, "Lamb": 12, "SGD": 8, "Muon": 8, "Lars": 8, "Adafactor": 4}[optimizer_type]
