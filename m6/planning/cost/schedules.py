"""The duration of the passes of a pipeline's schedule, on a virtual clock."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from m6.config.pipeline import PipelineSettings
from m6.training.pass_orders import PASS_KINDS, Orders, Pass, PassKind, async_orders, orders_of

_FILLED_ROUNDS = 4  # rounds of all ranks after which every schedule repeats itself


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of a micro-batch in one stage.

    Attributes:
        forward: of the forward pass.
        input: of the half of the backward pass for the gradient of the input.
        weight: of the half for the gradients of weights.
    """

    forward: float
    input: float
    weight: float

    def of(self, kind: PassKind) -> float:
        """Seconds of one pass."""
        return self.input + self.weight if kind == "backward" else float(getattr(self, kind))

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.input + self.weight


def run_clock(orders: Sequence[Sequence[Pass]], stages: Sequence[StageSeconds], message_s: float = 0.0) -> float:
    """Seconds until the last rank has ended.

    The passes of a rank follow each other, and a pass waits for its input. A message delays nothing else.

    Args:
        orders: the passes of each rank.
        stages: seconds of each stage.
        message_s: seconds of a message to the next or the previous stage on another rank.
    """
    seconds = [stage.of(kind) for stage in stages for kind in PASS_KINDS]
    clocks, done = [0.0] * len(orders), list[float]()
    for rank, pass_type, source, on_other_rank in _timetable(tuple(map(tuple, orders)), len(stages)):
        begin = clocks[rank]
        if source is not None:
            begin = max(begin, done[source] + message_s if on_other_rank else done[source])
        clocks[rank] = begin + seconds[pass_type]
        done.append(clocks[rank])
    return max(clocks)


class _Timed(NamedTuple):
    """A pass on the clock.

    Attributes:
        pass_type: stage x 4 + the index of its kind.
        source: the number of the earlier pass with its input.
        on_other_rank: whether its input comes in a message.
    """

    rank: int
    pass_type: int
    source: int | None
    on_other_rank: bool


@functools.lru_cache(maxsize=256)  # a search asks for the same orders with the seconds of thousands of cuts
def _timetable(orders: Orders, num_stages: int) -> tuple[_Timed, ...]:
    """The passes of all ranks in a topological order: each comes after its source."""
    rank_of = {each.stage: rank for rank, order in enumerate(orders) for each in order}
    places, done, found = [0] * len(orders), dict[Pass, int](), list[_Timed]()
    left = sum(len(order) for order in orders)
    while left:
        before = left
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                current, number, on_other_rank = order[places[rank]], None, False
                source = _source(current, num_stages - 1)
                if source is not None:
                    number = _finished(done, source)
                    if number is None:
                        break
                    on_other_rank = rank_of[source.stage] != rank
                done[current] = len(found)
                kind = PASS_KINDS.index(current.kind)
                found.append(_Timed(rank, current.stage * len(PASS_KINDS) + kind, number, on_other_rank))
                places[rank] += 1
                left -= 1
        assert left < before, "the ranks wait for each other"
    return tuple(found)


def filled_step(settings: PipelineSettings, micro_batches: int) -> int:
    """The number of micro-batches, at most ``micro_batches``, after which the schedule repeats itself."""
    ranks = settings.num_ranks
    if micro_batches % ranks and settings.schedule.startswith("interleaved"):
        return micro_batches  # its rounds have other sizes
    return min(micro_batches, _FILLED_ROUNDS * ranks + micro_batches % ranks)


def step_s(settings: PipelineSettings, micro_batches: int, stages: Sequence[StageSeconds], message_s: float) -> float:
    """Seconds of all passes of a step, waits included.

    The clock runs only the first and last ones of many micro-batches: between them a schedule repeats itself.
    """
    ranks, filled = settings.num_ranks, filled_step(settings, micro_batches)

    def run(number: int) -> float:
        orders = orders_of(settings.schedule, ranks, number, settings.stages_per_rank())
        return run_clock(orders, stages, message_s)

    if micro_batches <= filled + ranks:
        return run(micro_batches)
    longer = run(filled + ranks)
    return longer + (longer - run(filled)) / ranks * (micro_batches - filled - ranks)


def async_step_s(
    ranks: int, micro_batches: int, stages: Sequence[StageSeconds], message_s: float, steps: float
) -> float:
    """Seconds of a step, waits included, in a pipeline with a flush after every ``steps`` steps.

    The clock runs only the first and last ones of many micro-batches: between them each takes the period.

    Args:
        steps: a mean, not always whole.
    """
    filled = min(int(steps * micro_batches), _FILLED_ROUNDS * ranks)
    period = period_s(stages, message_s)
    waits = run_clock(async_orders(ranks, filled, 1), stages, message_s) - filled * period
    return micro_batches * period + waits / steps


def period_s(stages: Sequence[StageSeconds], message_s: float) -> float:
    """Seconds per micro-batch of 1F1B in its steady state.

    The rank of stage s begins a forward pass after the backward pass of the micro-batch P - s before. So neighbouring
    ranks i to j begin j - i + 1 micro-batches during the passes of one micro-batch from i to j and back. The slowest
    of all such neighbours set the pace. Without messages the slowest rank sets it.
    """
    most = 0.0
    for first in range(len(stages)):
        seconds = -2 * message_s
        for count, stage in enumerate(stages[first:], 1):
            seconds += stage.total + 2 * message_s
            most = max(most, seconds / count)
    return most


@functools.lru_cache(maxsize=256)
def most_in_flight(
    schedule: str, ranks: int, micro_batches: int, stages_per_rank: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The number of micro-batches with saved activations: from the forward to the end of the backward pass.

    Returns:
        for each rank a list of times; for each time the numbers of the rank's stages, in the order of the model. Times
        with at most the numbers of another time in every stage are left out.
    """
    found = []
    for order in orders_of(schedule, ranks, micro_batches, stages_per_rank):
        counts = dict.fromkeys(sorted({each.stage for each in order}), 0)
        times: set[tuple[int, ...]] = set()
        for each in order:
            counts[each.stage] += {"forward": 1, "input": 0, "weight": -1, "backward": -1}[each.kind]
            times.add(tuple(counts.values()))
        found.append(tuple(time for time in times if not any(time != o and _covers(o, time) for o in times)))
    return tuple(found)


def _covers(other: tuple[int, ...], time: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(other, time, strict=True))


def waits_of_equal_stages(schedule: str, ranks: int, stages_per_rank: int, rank: StageSeconds) -> float:
    """Seconds of waits of a rank in a step with equal stages and without messages, for any number of micro-batches.

    1F1B and interleaved 1F1B: arXiv 2104.04473, section 2.2; zero bubble: arXiv 2401.10241. The form for V schedules
    holds if the halves of a backward pass take as long as a forward pass.

    Args:
        rank: seconds of a micro-batch in all stages of a rank.
    """
    if schedule == "1f1b":
        return (ranks - 1) * rank.total
    if schedule == "interleaved_1f1b":
        return (ranks - 1) * rank.total / stages_per_rank
    return (ranks - 1) * (rank.forward + rank.input - rank.weight) / 2


def _source(current: Pass, last: int) -> Pass | None:
    """The pass with the input of ``current``."""
    kind, stage, number = current
    if kind == "forward":
        return Pass("forward", stage - 1, number) if stage else None
    if kind == "weight":
        return Pass("input", stage, number)
    return Pass("backward", stage + 1, number) if stage < last else Pass("forward", stage, number)


def _finished(done: dict[Pass, int], needed: Pass) -> int | None:
    # The gradient of a stage's input comes from a whole backward pass or from its first half.
    found = done.get(needed)
    return done.get(needed._replace(kind="input")) if found is None and needed.kind == "backward" else found
