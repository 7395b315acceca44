"""The order of slices on the clock against closed forms, and the choice of slices.

Uneven cuts against every cut there is.
"""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import RunConfig, parse_config
from m6.config.shares import apportion
from m6.errors import UserError
from m6.planning.cost.folding import fold
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.schedules import StageSeconds, most_in_flight, run_clock
from m6.planning.cost.work import work_of
from m6.training.engine.sliced_pipeline import SliceChoice, slice_tokens, slice_work, subsample
from m6.training.pass_orders import orders_of, sliced_orders
from m6.training.sizes import BatchShape
from tests.fixtures.tiny_run import tiny_document
from tests.unit.model.test_slices import batch_of


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_slices_are_the_best_of_all(rows: int, stages: int, seed: int):
    generator = random.Random(seed)
    a, b, c = generator.random(), generator.random() / 50, generator.random() * 10
    places = sorted(generator.sample(range(1, 64), 7))

    def seconds(length: int, context: int) -> float:
        return a * length + b * length * (context + length / 2) + c

    def cost(cuts: Sequence[int]) -> float:
        each = [seconds(y - x, x) for x, y in itertools.pairwise([0, *cuts, 64])]
        return rows * sum(each) + (stages - 1) * max(each)

    cuts, found = slice_tokens(64, places, stages, rows, seconds)
    best = min(cost(cuts) for number in range(8) for cuts in itertools.combinations(places, number))
    assert found == pytest.approx(best)
    assert cost(cuts) == pytest.approx(best)
    if stages == 1:
        assert cuts == []


def test_more_rows_are_cut_into_fewer_slices():
    """Each slice costs something, and with many rows the wait for the first one is a small part of a step."""
    numbers = [len(slice_tokens(64, range(1, 64), 8, rows, lambda size, before: 2.0 + size)[0]) for rows in (1, 8, 64)]
    assert numbers == sorted(numbers, reverse=True)
    assert len(set(numbers)) == 3


def test_slices_pass_on_the_clock_in_the_time_of_the_formula():
    """Jobs of the same length on all stages, one after the other: M sum t + (K - 1) max t."""
    generator = random.Random(0)
    each = [generator.random() for _ in range(4)]
    for rows, stages in ((1, 3), (5, 4)):
        ends = [0.0] * stages
        for seconds in each * rows:
            ready = 0.0
            for stage in range(stages):
                ready = ends[stage] = max(ready, ends[stage]) + seconds
        assert ends[-1] == pytest.approx(rows * sum(each) + (stages - 1) * max(each))


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_the_best_of_all(seed: int):
    generator = random.Random(seed)
    devices, rows = generator.randrange(1, 5), generator.randrange(1, 10)
    speeds = [generator.choice((1.0, 2.0, 3.5)) for _ in range(devices)]
    capacities = [generator.randrange(0, 8) for _ in range(devices)]
    if sum(capacities) < rows:
        with pytest.raises(UserError, match="do not fit"):
            apportion(rows, speeds, capacities)
        return
    shares = apportion(rows, speeds, capacities)
    assert sum(shares) == rows
    assert all(share <= capacity for share, capacity in zip(shares, capacities, strict=True))
    best = min(
        max(share / speed for share, speed in zip(option, speeds, strict=True))
        for option in itertools.product(*(range(capacity + 1) for capacity in capacities))
        if sum(option) == rows
    )
    assert max(share / speed for share, speed in zip(shares, speeds, strict=True)) == pytest.approx(best)


def in_flight(order: Any) -> int:
    """The most slices whose activations a rank keeps."""
    return max(itertools.accumulate(1 if each.kind == "forward" else -1 for each in order))


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 4), (4, 2), (8, 1), (8, 8), (8, 32)])
def test_equal_slices_wait_and_hold_as_the_closed_forms_say(ranks: int, micro_batches: int, slices: int):
    """Waits are 1 / n of those of whole rows, and activations (P + n - 1) / n of a micro-batch's (Seq1F1B)."""
    orders = sliced_orders(ranks, (slices,) * micro_batches)
    found = run_clock(orders, [StageSeconds(1 / slices, 1 / slices, 1 / slices)] * ranks)
    assert found == pytest.approx(3 * micro_batches + 3 * (ranks - 1) / slices)
    expected = [min(ranks - rank + slices - 1, micro_batches * slices) for rank in range(ranks)]
    assert [in_flight(order) for order in orders] == expected
    if slices == 1:
        assert orders == orders_of("1f1b", ranks, micro_batches, 1)
        assert [times[0] for times, *_ in most_in_flight("1f1b", ranks, micro_batches, 1)] == expected


@pytest.mark.parametrize("seed", range(20))
def test_micro_batches_may_have_different_numbers_of_slices(seed: int):
    """The ranks never wait for each other, and slices go backward from the last one, after all of their micro-batch."""
    generator = random.Random(seed)
    ranks = generator.randrange(2, 6)
    slices = tuple(generator.randrange(1, 6) for _ in range(generator.randrange(1, 8)))
    orders = sliced_orders(ranks, slices)
    run_clock(orders, [StageSeconds(1, 1, 1)] * ranks)
    ends = list(itertools.accumulate(slices))
    for order in orders:
        forward = [each.number for each in order if each.kind == "forward"]
        backward = [each.number for each in order if each.kind == "backward"]
        assert forward == list(range(ends[-1]))
        parts = [backward[end - count : end] for end, count in zip(ends, slices, strict=True)]
        for part, end, count in zip(parts, ends, slices, strict=True):
            assert part == list(range(end - count, end))[::-1]
            places = [order.index(each) for each in order if each.number in part]
            kinds = [order[place].kind for place in places]
            assert kinds == ["forward"] * count + ["backward"] * count


def config_of(folder: Path, **changes: Any) -> RunConfig:
    changes = {"m6__parallel__pipeline": {"num_ranks": 2, "slices": "auto"}, "train_batch_size": 16, **changes}
    return parse_config(tiny_document(folder, zero_optimization={"stage": 1}, **changes))


@pytest.mark.parametrize("moe", [None, {"num_experts": 8, "top_k": 2, "activation": "swiglu", "num_shared_experts": 1}])
def test_the_work_of_a_row_is_that_of_its_products(tmp_path: Path, moe: Any):
    """A slice of all tokens takes the FLOPs that the planner counts; both leave out something of biases and routers."""
    config, length = config_of(tmp_path, m6__moe=moe), 4096
    products = work_of(config, fold(config.model), BatchShape(1, 1, length, length, length, 0), ParallelLayout(1))
    expected = sum(count * work.flops for work, count in products[1:-1])
    assert slice_work(config.model, 1, 1)(length, 0) == pytest.approx(expected, rel=0.02)
    # The last of two slices reads the keys of both.
    halves = [slice_work(config.model, 1, 1)(length // 2, before) for before in (0, length // 2)]
    assert halves[0] < halves[1] < expected / 2 * 1.02


def test_rows_are_cut_automatically_where_it_pays(tmp_path: Path):
    """Not into slices whose products take less time than the memory takes to move the weights: 200 tokens."""
    numbers = []
    for rows in (2, 16, 64):
        choice = SliceChoice(config_of(tmp_path, m6__moe=None), micro_batches=4)
        numbers.append(len(choice.cuts(batch_of([[(0, 0, 64)]] * rows, 64, 3))) + 1)
    assert numbers == [1, 5, 16]


def test_thinned_cuts_are_spread():
    cuts = list(range(10, 80, 10))
    for number in range(8):
        found = subsample(cuts, number)
        assert len(found) == len(set(found)) == number
        assert set(found) <= set(cuts)
    assert subsample(cuts, 7) == cuts
    assert subsample(cuts, 1) == [40]
    assert subsample(cuts, 3) == [20, 40, 60]
