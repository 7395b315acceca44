"""The clock of pipelines against closed forms, and the orders of passes against what a step must contain."""

import random

import pytest

from m6.config.pipeline import SCHEDULES, PipelineSettings
from m6.planning.cost.schedules import (
    StageSeconds,
    async_step_s,
    most_in_flight,
    period_s,
    run_clock,
    step_s,
    waits_of_equal_stages,
)
from m6.training.pass_orders import async_orders, orders_of


def stages_per_rank(schedule: str) -> int:
    return 1 if schedule == "1f1b" else 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_equal_stages_wait_as_the_closed_forms_say(schedule: str, ranks: int, micro_batches: int):
    each = stages_per_rank(schedule)
    stage = StageSeconds(1 / each, 1 / each, 1 / each)
    found = run_clock(orders_of(schedule, ranks, micro_batches, each), [stage] * (ranks * each))
    waits = waits_of_equal_stages(schedule, ranks, each, StageSeconds(1, 1, 1))
    assert found == pytest.approx(3 * micro_batches + waits)
    if schedule in ("1f1b", "interleaved_1f1b"):  # forms that hold for any times
        slow = StageSeconds(0.7 / each, 1.9 / each, 0.4 / each)
        found = run_clock(orders_of(schedule, ranks, micro_batches, each), [slow] * (ranks * each))
        waits = waits_of_equal_stages(schedule, ranks, each, StageSeconds(0.7, 1.9, 0.4))
        assert found == pytest.approx(3 * micro_batches + waits)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_micro_batch_passes_every_stage_once_in_each_direction(schedule: str):
    each = stages_per_rank(schedule)
    passes = [found for rank in orders_of(schedule, 4, 8, each) for found in rank]
    for stage in range(4 * each):
        kinds = [(found.kind, found.number) for found in passes if found.stage == stage]
        assert len(kinds) == len(set(kinds))
        assert {number for kind, number in kinds if kind == "forward"} == set(range(8))
        whole = {number for kind, number in kinds if kind == "backward"}
        halves = [{number for kind, number in kinds if kind == half} for half in ("input", "weight")]
        assert halves[0] == halves[1] == set(range(8)) - whole


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_step_is_priced_as_if_the_clock_ran_all_of_it(schedule: str):
    """Stages as different as those of a bad cut: the error is below 2 %; of equal stages there is none."""
    generator, each = random.Random(3), stages_per_rank(schedule)
    settings = PipelineSettings(num_ranks=4, schedule=schedule)  # type: ignore[arg-type]
    for _ in range(5):
        stages = [StageSeconds(*(generator.uniform(0.5, 2.0) for _ in range(3))) for _ in range(4 * each)]
        whole = run_clock(orders_of(schedule, 4, 64, each), stages, 0.1)
        assert step_s(settings, 64, stages, 0.1) == pytest.approx(whole, rel=0.02)
        assert run_clock(orders_of(schedule, 4, 8, each), stages, 0.0) < step_s(settings, 8, stages, 0.5)
    equal = [StageSeconds(1, 1, 1)] * (4 * each)
    assert step_s(settings, 64, equal, 0.0) == pytest.approx(run_clock(orders_of(schedule, 4, 64, each), equal))


@pytest.mark.parametrize(("ranks", "micro_batches", "steps"), [(2, 2, 1), (2, 4, 5), (4, 4, 10), (4, 6, 3), (8, 9, 4)])
def test_without_a_flush_equal_stages_wait_once_for_several_steps(ranks: int, micro_batches: int, steps: int):
    """(P - 1)(F + B) for each flush, by the clock and by the price; rounding alone."""
    stages, both = [StageSeconds(0.7, 1.9, 0.4)] * ranks, 0.7 + 1.9 + 0.4
    computing, waits = steps * micro_batches * both, (ranks - 1) * both
    flushed = steps * run_clock(orders_of("1f1b", ranks, micro_batches, 1), stages)
    assert flushed == pytest.approx(computing + steps * waits, rel=1e-9)
    found = run_clock(async_orders(ranks, micro_batches, steps), stages)
    assert found == pytest.approx(computing + waits, rel=1e-9)
    price = async_step_s(ranks, micro_batches, stages, 0.0, steps)
    assert price == pytest.approx((computing + waits) / steps, rel=1e-9)


def test_without_a_flush_ranks_begin_the_next_step_before_they_end_one():
    ranks, micro_batches, steps = 4, 5, 3
    for rank, order in enumerate(async_orders(ranks, micro_batches, steps)):
        for kind in ("forward", "backward"):
            assert [each.number for each in order if each.kind == kind] == list(range(micro_batches * steps))
        for step in (1, 2):
            ends = order.index(("backward", rank, step * micro_batches - 1))
            begun = [each for each in order[:ends] if each.kind == "forward" and each.number >= step * micro_batches]
            assert len(begun) == ranks - rank - 1


def test_unequal_stages_without_a_flush_are_priced_as_if_the_clock_ran_all_steps():
    """Stages as different as those of a bad cut, and messages as long as a pass: the error is below 1 %."""
    generator = random.Random(3)
    for ranks, micro_batches, steps in [(2, 3, 10), (3, 8, 5), (4, 4, 25), (4, 16, 2), (8, 8, 10)]:
        for message_s in (0.0, 0.1, 1.0):
            stages = [StageSeconds(*(generator.uniform(0.5, 2.0) for _ in range(3))) for _ in range(ranks)]
            whole = run_clock(async_orders(ranks, micro_batches, steps), stages, message_s)
            price = async_step_s(ranks, micro_batches, stages, message_s, steps)
            assert price == pytest.approx(whole / steps, rel=0.01)
            # No rank computes longer than its own passes take, whatever the mean number of steps is.
            assert async_step_s(ranks, micro_batches, stages, message_s, 9.5) > micro_batches * max(
                stage.total for stage in stages
            )
            # The ranks repeat themselves after some number of micro-batches, at most P: 840 is a multiple of all.
            begun = run_clock(orders_of("1f1b", ranks, 500, 1), stages, message_s)
            later = run_clock(orders_of("1f1b", ranks, 1340, 1), stages, message_s)
            assert (later - begun) / 840 == pytest.approx(period_s(stages, message_s), rel=1e-9)


def test_ranks_keep_as_many_activations_as_published():
    """1F1B: as many micro-batches as stages follow; ZB-V: never more than the first rank of 1F1B, in half stages."""
    assert most_in_flight("1f1b", 4, 8, 1) == (((4,),), ((3,),), ((2,),), ((1,),))
    for times in most_in_flight("zbv", 4, 8, 2):
        assert max(map(sum, times)) == 2 * 4
    for times in most_in_flight("dualpipev", 4, 8, 2):
        assert max(map(sum, times)) == 2 * 4 + 1
