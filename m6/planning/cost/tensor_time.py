"""Seconds in which the ranks of a tensor group exchange parts of matrices, by placement.

The collectives are those of ``m6/model/tensor``, whose tests count them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from m6.architecture.received import side
from m6.planning.cost.layout import ParallelLayout
from m6.planning.machine.cluster import Nodes
from m6.planning.machine.collectives import RankGroup, contiguous_group, strided_group

Collective = Callable[[Literal["all_reduce", "all_gather"], float, RankGroup], float]
"""Seconds of a collective of a group; of an all-gather by the bytes of its output. A reduce-scatter takes as long."""


def block_s(
    layout: ParallelLayout, tokens: int, hidden: int, inner: int, width: int, nodes: Nodes, collective: Collective
) -> float:
    """Seconds of one dense block for one micro-batch, forward and backward, and forward again with checkpointing.

    Args:
        tokens: of the micro-batch.
        hidden, inner: sizes of the feed-forward.
        width: bytes of an element.
    """
    group = contiguous_group(layout.tp_size, nodes)
    passes = 3 if layout.checkpointing else 2
    # Attention, and a feed-forward in 1-D: a sum of outputs forward, and of the inputs' gradients backward.
    reduced = passes * collective("all_reduce", tokens * hidden * width, group)
    if layout.placement == "1d" or layout.placement == "megatron":
        return 2 * reduced
    # The whole hidden states around the feed-forward: gathered outputs forward, gathered gradients backward, and the
    # gradients of both biases.
    around = passes * collective("all_gather", tokens * hidden * width, group)
    around += collective("all_reduce", inner * width, group) + collective("all_reduce", hidden * width, group)
    q = side(layout.placement, layout.tp_size)
    assert q is not None
    row, matrix = tokens * width, hidden * inner * width
    forward_passes = passes - 1
    if layout.placement == "2d":
        # Of each product both operands are gathered, again in the backward pass, where both gradients are summed up.
        operands = collective("all_gather", row * (hidden + inner) / q, strided_group(q, 1, nodes))
        operands += 2 * collective("all_gather", matrix / q, strided_group(q, q, nodes))
        return reduced + around + (forward_passes + 2) * operands
    # The same on a cube, and results are summed up forward and gathered backward. What is the input of one product lies
    # along the same axis as the result of the other.
    operands = results = 0.0
    for inputs, outputs, along_inputs, along_outputs in ((hidden, inner, q, 1), (inner, hidden, 1, q)):
        operands += collective("all_gather", row * inputs / q**2, strided_group(q, along_inputs, nodes))
        operands += collective("all_gather", matrix / q**2, strided_group(q, q * q, nodes))
        results += collective("all_gather", row * outputs / q**2, strided_group(q, along_outputs, nodes))
    return reduced + around + (forward_passes + 2) * operands + (forward_passes + 1) * results
