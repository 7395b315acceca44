"""Bytes of gradients that are added to those before them, where two are read and one is written."""

from __future__ import annotations

from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel


def added_bytes(memory: MemoryModel, layout: ParallelLayout, passes: int, place: int) -> float:
    """Bytes that autograd reads and writes for it in a step; experts of ``m6.offload`` are not among them.

    At stages 0 and 1 the gradients of all micro-batches add up, at the others those of a backward pass: of
    micro-batches that take turns, of layers that share weights, of the table, which embeds tokens and is the head, and
    of the parts in which tokens go to experts.

    Args:
        passes: backward passes of the step.
        place: of the rank in the pipeline.
    """
    begun, together = (1, passes) if layout.zero_stage < 2 else (passes, 1)
    each = together * layout.micro_batches_at_once
    used, held, model = memory.used_by_rank(layout, place), memory.counts_of_ranks(layout)[place], memory.config.model
    once = layout.pp_size > 1 or held.frozen  # in a pipeline the table lies on two ranks; adapters leave it alone
    table = 0 if once else model.vocab_size * model.hidden_size
    arriving = each * (used.local + (memory.exchange_parts(layout) - 1) * used.experts + table)
    return 3 * memory.precision.weights * begun * (arriving - held.local) / layout.tp_size
