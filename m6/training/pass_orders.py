"""The order of the passes of a pipeline's ranks, for each schedule."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal, NamedTuple, get_args

PassKind = Literal["forward", "backward", "input", "weight"]
PASS_KINDS: tuple[PassKind, ...] = get_args(PassKind)
_KINDS: dict[str, PassKind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
}
# PyTorch's classes of the schedules with several stages on a rank.
_CLASSES = {
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage; the halves of a backward pass are ``input`` and ``weight``."""

    kind: PassKind
    stage: int
    number: int


Orders = tuple[tuple[Pass, ...], ...]
"""The passes of each rank of a pipeline, in their order."""


@functools.lru_cache(maxsize=256)
def orders_of(schedule: str, ranks: int, micro_batches: int, stages_per_rank: int) -> Orders:
    """The order of the passes in a step, as run by the schedule classes of PyTorch 2.13.

    Args:
        schedule: a name of ``PipelineSettings.schedule``.
    """
    if schedule == "1f1b":  # PyTorch's list for its class of this schedule has superfluous passes
        return tuple(_one_forward_one_backward(rank, ranks, micro_batches) for rank in range(ranks))
    # Imported here, as the import takes seconds.
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    actions = get_schedule_ops(_CLASSES[schedule], ranks, micro_batches, stages_per_rank)
    return tuple(tuple(each for action in rank if action is not None for each in _passes(action)) for rank in actions)


def _one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> tuple[Pass, ...]:
    ahead = min(ranks - rank, micro_batches)  # micro-batches in flight before the first backward pass
    found = [Pass("forward", rank, number) for number in range(ahead)]
    for number in range(micro_batches):
        found.append(Pass("backward", rank, number))
        if number + ahead < micro_batches:
            found.append(Pass("forward", rank, number + ahead))
    return tuple(found)


@functools.lru_cache(maxsize=64)
def sliced_orders(ranks: int, slices: tuple[int, ...]) -> Orders:
    """The order of 1F1B with slices: Seq1F1B (arXiv 2406.03488), section 3.

    The slices of a micro-batch go forward from the first to the last, and backward from the last to the first. The rank
    of stage s begins its first backward pass after P - s + n - 1 forward passes (P ranks, n slices).

    Args:
        slices: the number of each micro-batch's slices. Slices are numbered consecutively over all micro-batches.
    """
    ends = list(itertools.accumulate(slices))
    backward = [number for count, end in zip(slices, ends, strict=True) for number in reversed(range(end - count, end))]
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank + max(slices) - 1, ends[-1])
        found = [Pass("forward", rank, number) for number in range(ahead)]
        for done, number in enumerate(backward):
            found.append(Pass("backward", rank, number))
            if done + ahead < ends[-1]:
                found.append(Pass("forward", rank, done + ahead))
        orders.append(tuple(found))
    return tuple(orders)


def async_orders(ranks: int, micro_batches: int, steps: int) -> Orders:
    """The order of the passes of several steps without a flush between them: PipeDream-2BW (arXiv 2006.09503).

    It is 1F1B over the micro-batches of all steps, numbered consecutively. At the end of a step the rank of stage s has
    P - s - 1 of them in flight. It ends them between the first forward passes of the next step. After the last step all
    passes end.
    """
    return orders_of("1f1b", ranks, steps * micro_batches, 1)


def _passes(action: Any) -> tuple[Pass, ...]:
    parts = action.sub_actions or (action,)  # DualPipeV lists pairs of passes; they run one after the other
    return tuple(
        Pass(_KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
        for part in parts
        if part.computation_type.name in _KINDS  # the rest are reductions
    )
