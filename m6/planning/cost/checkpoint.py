"""The bytes of a checkpoint: of the file that a rank writes, and in host memory meanwhile."""

from __future__ import annotations

from m6.checkpoints.format import SHARD_BYTES
from m6.planning.cost.gradient_bytes import is_compressed
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.precision import FP32
from m6.planning.cost.reduction_time import shared_gradients


def checkpoint_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes that one rank writes, all in fp32: weights, moments, and gradients that wait for a later step."""
    counts = memory.counts(layout).divided(layout)
    replicas = layout.dp_size // layout.ep_size
    owned = (counts.local - counts.experts) / layout.dp_size + counts.experts / replicas
    late = 0 if memory.config.m6.gradient_delay is None else FP32
    written = owned * (_state_bytes(memory.config.deepspeed.optimizer_type) + late) + _residual_bytes(memory, layout)
    streamed = memory.stored_experts(layout) / layout.tp_size / replicas
    if streamed:
        written += streamed * (_state_bytes(memory.expert_store(layout).optimizer_type) + late)
    return written


def copied_bytes(memory: MemoryModel, layout: ParallelLayout) -> float:
    """Bytes of one rank in host memory while it writes: all that it writes, or with ``async_save: false`` one file."""
    whole = checkpoint_bytes(memory, layout)
    return whole if memory.config.m6.checkpoint.async_save else min(whole, SHARD_BYTES)


def _residual_bytes(memory: MemoryModel, layout: ParallelLayout) -> int:
    """What a rank has not sent of compressed gradients, whole ones; the factors of powersgd are negligible."""
    settings = memory.config.m6.communication
    if not settings.compresses:
        return 0
    gradients = shared_gradients(memory.model, layout)
    return FP32 * sum(gradient.numel for gradient in gradients if is_compressed(gradient, settings))


def _state_bytes(optimizer_type: str) -> int:
    """The weight, and two moments or a momentum. Adafactor's row and column means are negligible."""
    return {"AdamW": 12, "Lamb": 12, "SGD": 8, "Muon": 8, "Lars": 8, "Adafactor": 4}[optimizer_type]
