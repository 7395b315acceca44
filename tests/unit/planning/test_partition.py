"""Uneven cuts against every cut there is."""

import itertools
import math
import random

import pytest

from m6.errors import UserError
from m6.planning.cost.partition import balanced_share, delayed_step_s, partition_layers, share_rows, slice_tokens


def every_partition(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), stages - 1)]


@pytest.mark.parametrize("seed", range(40))
def test_partition_is_the_best_of_all(seed: int):
    generator = random.Random(seed)
    layers = generator.randrange(1, 11)
    stages = generator.randrange(1, min(4, layers) + 1)
    times = [generator.random() for _ in range(layers)]
    memories = [generator.random() for _ in range(layers)]
    caps = [generator.uniform(0.3, 1.0) * layers / stages * 1.5 for _ in range(stages)]
    best = math.inf
    for edges in every_partition(layers, stages):
        pairs = list(itertools.pairwise(edges))
        if all(sum(memories[a:b]) <= cap + 1e-12 for (a, b), cap in zip(pairs, caps, strict=True)):
            best = min(best, max(sum(times[a:b]) for a, b in pairs))
    if best == math.inf:
        with pytest.raises(UserError, match="no partition"):
            partition_layers(times, memories, caps)
        return
    starts, slowest = partition_layers(times, memories, caps)
    assert slowest == pytest.approx(best)
    edges = [*starts, layers]
    assert starts[0] == 0
    assert max(sum(times[a:b]) for a, b in itertools.pairwise(edges)) == pytest.approx(slowest)


def test_early_stages_keep_more_activations_and_get_fewer_layers():
    starts, _ = partition_layers([1.0] * 8, [1.0] * 8, [2.0, 10.0])
    assert starts == [0, 2]
    with pytest.raises(UserError, match="3 stages of 2 layers"):
        partition_layers([1, 1], [1, 1], [9, 9, 9])


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


def test_a_schedule_without_flush_has_no_bubble():
    flushed, delayed = delayed_step_s(2.0, 8, 4)
    assert (flushed, delayed) == (22.0, 16.0)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_share_is_the_best_of_all_cuts(seed: int):
    generator = random.Random(seed)
    times = [generator.uniform(0.1, 2.0) for _ in range(generator.randrange(2, 9))]
    stages = generator.randrange(1, len(times) + 1)
    best = min(
        max(sum(times[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(times))))
        for cuts in itertools.combinations(range(1, len(times)), stages - 1)
    )
    assert balanced_share(times, stages) == pytest.approx(best / sum(times), rel=1e-6)
    assert balanced_share(times, stages) == pytest.approx(
        partition_layers(times, [0.0] * len(times), [0.0] * stages)[1] / sum(times), rel=1e-6
    )
