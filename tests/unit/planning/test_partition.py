"""Uneven cuts against every cut there is."""

import itertools
import random
from collections.abc import Sequence

import pytest

from m6.errors import UserError
from m6.planning.cost.partition import share_rows, slice_tokens


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
            share_rows(rows, speeds, capacities)
        return
    shares = share_rows(rows, speeds, capacities)
    assert sum(shares) == rows
    assert all(share <= capacity for share, capacity in zip(shares, capacities, strict=True))
    best = min(
        max(share / speed for share, speed in zip(option, speeds, strict=True))
        for option in itertools.product(*(range(capacity + 1) for capacity in capacities))
        if sum(option) == rows
    )
    assert max(share / speed for share, speed in zip(shares, speeds, strict=True)) == pytest.approx(best)
