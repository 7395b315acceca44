"""The bytes of a checkpoint: of the file that a rank writes, and in host memory meanwhile."""

from __future__ import annotations

from m6.checkpoints.format import SHARD_BYTES
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel


def checkpoint_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes that one rank writes: fp32 weights and moments."""
    counts = memory.counts(layout).divided(layout)
    replicas = layout.dp_size // layout.ep_size
    owned = (counts.local - counts.experts) / layout.dp_size + counts.experts / replicas
    written = owned * _state_bytes(memory.config.deepspeed.optimizer_type)
    streamed = memory.stored_experts(layout) / layout.tp_size / replicas
    return written + streamed * _state_bytes(memory.expert_store(layout).optimizer_type) if streamed else written


def copied_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes of one rank in host memory while it writes: all that it writes, or with ``async_save: false`` one file."""
    whole = checkpoint_bytes(memory, layout)
    return whole if memory.config.m6.checkpoint.async_save else min(whole, SHARD_BYTES)


def _state_bytes(optimizer_type: str) -> int:
    """The weight, and two moments or a momentum. Adafactor's row and column means are negligible."""
    return {"AdamW": 12, "Lamb": 12, "SGD": 8, "Muon": 8, "Lars": 8, "Adafactor": 4}[optimizer_type]
