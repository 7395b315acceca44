"""Uneven cuts against every cut there is."""

import itertools
import math
import random

import pytest

from m6.errors import UserError
from m6.planning.cost.partition import share_rows, slice_tokens


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_slices_are_the_best_of_all(stages: int, seed: int):
    generator = random.Random(seed)
    a, b, c = generator.random(), generator.random() / 50, generator.random() * 10

    def seconds(length: int, context: int) -> float:
        return a * length + b * length * (context + length / 2) + c

    slices, cost = slice_tokens(64, stages, seconds)
    best = math.inf
    for number in range(8):
        for cuts in itertools.combinations(range(1, 8), number):
            edges = [0, *cuts, 8]
            each = [seconds((y - x) * 8, x * 8) for x, y in itertools.pairwise(edges)]
            best = min(best, sum(each) + (stages - 1) * max(each))
    assert cost == pytest.approx(best)
    assert sum(slices) == 64
    if stages == 1:
        assert slices == [64]
    with pytest.raises(UserError, match="multiple of 8"):
        slice_tokens(60, stages, seconds)


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
