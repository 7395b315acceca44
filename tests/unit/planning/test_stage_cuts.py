"""Cuts of a pipeline against every cut there is."""

import itertools
import random
from collections.abc import Sequence

import pytest

from m6.planning.cost.schedules import StageSeconds, async_step_s, run_clock
from m6.planning.cost.stage_cuts import Fits, Shape, cut_layers
from m6.training.pass_orders import orders_of

SCHEDULES: dict[Shape, str] = {"line": "1f1b", "rounds": "interleaved_1f1b", "v": "zbv"}


def stages_of(sizes: Sequence[int], shape: Shape, ranks: int) -> list[list[range]]:
    """Rank -> its stages."""
    stages = [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    second = {"line": lambda rank: [], "rounds": lambda rank: [ranks + rank], "v": lambda rank: [2 * ranks - 1 - rank]}
    return [[stages[rank], *(stages[number] for number in second[shape](rank))] for rank in range(ranks)]


def cost(seconds: Sequence[Sequence[float]], held: list[list[range]]) -> tuple[float, float]:
    """Seconds of the slowest rank, and the sum of squares of the stages'."""
    times = [[sum(own[layer] for layer in stage) for stage in of] for own, of in zip(seconds, held, strict=True)]
    return max(map(sum, times)), sum(each**2 for of_rank in times for each in of_rank)


def every_cut(layers: int, ranks: int, shape: Shape) -> list[tuple[int, ...]]:
    stages = ranks if shape == "line" else 2 * ranks
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *ends, layers)))
        for ends in itertools.combinations(range(1, layers), stages - 1)
    ]


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("seed", range(25))
def test_cut_is_the_best_of_all(shape: Shape, seed: int):
    """Layers and devices of different speeds, ranks that hold no more than some layers, and need one of a kind."""
    generator = random.Random(seed)
    ranks = generator.choice([2, 3])
    layers = generator.randrange(ranks if shape == "line" else 2 * ranks, 10)
    speeds = [generator.choice([1.0, 1.0, 2.0]) for _ in range(ranks)]
    work = [generator.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(layers)]
    seconds = [[each / speed for each in work] for speed in speeds]
    most = [generator.choice([3, 4, 6, 99]) for _ in range(ranks)]

    def fits(rank: int, stages: Sequence[range]) -> bool:
        return sum(map(len, stages)) <= most[rank]

    needed = [layer for layer in range(layers) if generator.random() < 0.6]

    def suits(rank: int, stages: Sequence[range]) -> bool:
        return any(layer in stage for stage in stages for layer in needed)

    cuts = [stages_of(sizes, shape, ranks) for sizes in every_cut(layers, ranks, shape)]
    fitting = [held for held in cuts if all(fits(rank, own) and suits(rank, own) for rank, own in enumerate(held))]
    found = cut_layers(seconds, shape, fits, suits)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert sum(found) == layers
    held = stages_of(found, shape, ranks)
    assert all(fits(rank, own) and suits(rank, own) for rank, own in enumerate(held))
    assert cost(seconds, held) == pytest.approx(min(cost(seconds, each) for each in fitting))


def test_more_stages_than_layers_have_no_cut():
    fits: Fits = lambda rank, stages: True  # noqa: E731
    assert cut_layers([[1.0, 1.0]] * 3, "line", fits) is None
    assert cut_layers([[1.0, 1.0, 1.0]] * 2, "v", fits) is None
    assert cut_layers([[1.0, 1.0, 1.0, 1.0]] * 2, "v", fits) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("shape", "ranks", "layers", "micro_batches", "gap"),
    [("v", 2, 10, 8, 0.01), ("v", 3, 11, 6, 0.02), ("line", 4, 12, 16, 0.001), ("line", 2, 10, 8, 0.001)],
)
def test_on_the_clock_the_cut_is_as_good_as_any(shape: Shape, ranks: int, layers: int, micro_batches: int, gap: float):
    """The slowest rank decides almost all of a step: the best of all cuts on the clock is hardly faster."""
    work = [1.1, *[1.0] * (layers - 2), 1.8]  # embeddings and head come on top

    def step(sizes: Sequence[int]) -> float:
        ends = itertools.accumulate(sizes)
        times = [sum(work[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        orders = orders_of(SCHEDULES[shape], ranks, micro_batches, 1 if shape == "line" else 2)
        return run_clock(orders, [StageSeconds(each, each, each) for each in times], 0.02)

    found = cut_layers([work] * ranks, shape, lambda rank, stages: True)
    assert found is not None
    assert step(found) <= min(map(step, every_cut(layers, ranks, shape))) * (1 + gap)


@pytest.mark.parametrize(("ranks", "layers", "micro_batches"), [(2, 10, 2), (3, 9, 3), (4, 12, 6)])
def test_without_a_flush_no_cut_is_faster(ranks: int, layers: int, micro_batches: int):
    """Few micro-batches in a step, one flush in ten steps: the slowest rank decides, not the waits of the others."""
    generator = random.Random(layers)
    for _ in range(5):
        work = [generator.uniform(0.8, 1.2) for _ in range(layers)]

        def step(sizes: Sequence[int], work: list[float] = work) -> float:
            ends = itertools.accumulate(sizes)
            times = [sum(work[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
            stages = [StageSeconds(each, each, each) for each in times]
            return async_step_s(ranks, micro_batches, stages, 0.0, 10)

        found = cut_layers([work] * ranks, "line", lambda rank, stages: True)
        assert found is not None
        # Of cuts that are as good some waits differ by rounding.
        assert step(found) == pytest.approx(min(map(step, every_cut(layers, ranks, "line"))), rel=1e-9)


def memory_of(generator: random.Random, ranks: int, layers: int) -> Fits:
    """Ranks hold weighted numbers of layers, the first and the last layer of the model weigh more."""
    rooms = [generator.choice([layers / ranks, 1.5 * layers / ranks, 2.5 * layers]) for _ in range(ranks)]
    weights = [generator.choice([(1.0, 1.0), (1.0, 1.6), (2.0, 1.0)]) for _ in range(ranks)]

    def fits(rank: int, stages: Sequence[range]) -> bool:
        held = sum(weight * len(stage) for weight, stage in zip(weights[rank], stages, strict=False))
        held += sum(0.7 * (stage.start == 0) + 1.3 * (stage.stop == layers) for stage in stages)
        return held <= rooms[rank]

    return fits


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("seed", range(30))
def test_cut_of_equal_layers_is_the_best_of_all(shape: Shape, seed: int):
    """By their numbers alone, as by their positions, and as the best of all cuts; ranks differ in speed and memory."""
    generator = random.Random(seed)
    ranks = generator.choice([2, 3])
    layers = generator.randrange(ranks if shape == "line" else 2 * ranks, 11)
    work = [1.0] * layers
    work[0] += generator.choice([0.0, 0.3, 2.0])
    work[-1] += generator.choice([0.0, 0.8, 3.0])
    speeds = [generator.choice([1.0, 1.0, 2.0]) for _ in range(ranks)]
    seconds = [[each / speed for each in work] for speed in speeds]
    fits = memory_of(generator, ranks, layers)
    found = cut_layers(seconds, shape, fits, kinds=["sparse"] * layers)
    slow = cut_layers(seconds, shape, fits)
    cuts = [stages_of(sizes, shape, ranks) for sizes in every_cut(layers, ranks, shape)]
    fitting = [held for held in cuts if all(fits(rank, own) for rank, own in enumerate(held))]
    if not fitting:
        assert found is slow is None
        return
    assert found is not None
    assert slow is not None
    assert sum(found) == layers
    held = stages_of(found, shape, ranks)
    assert all(fits(rank, own) for rank, own in enumerate(held))
    assert cost(seconds, held) == pytest.approx(cost(seconds, stages_of(slow, shape, ranks)))
    assert cost(seconds, held) == pytest.approx(min(cost(seconds, each) for each in fitting))


def test_the_search_for_a_cut_of_equal_layers_does_not_grow_with_positions():
    """A number of questions for the memory of a rank that grows with the layers, whether a cut fits or not."""

    def asked(layers: int, room: float) -> int:
        calls = 0

        def fits(rank: int, stages: Sequence[range]) -> bool:
            nonlocal calls
            calls += 1
            return sum(map(len, stages)) <= room * layers / 4

        found = cut_layers([[1.0] * layers] * 4, "rounds", fits, kinds=[True] * layers)
        assert (found is None) == (room < 1)
        return calls

    for room in (0.9, 1.0, 2.0):
        for layers in (12, 24, 48, 96):
            assert asked(layers, room) <= 16 * layers


@pytest.mark.parametrize("shape", ["rounds", "v"])
def test_a_rank_that_holds_few_layers_is_asked_as_often_for_a_deep_model(shape: Shape):
    """Pairs of stages beyond its memory are not tried one by one."""

    def asked(layers: int) -> int:
        calls = 0

        def fits(rank: int, stages: Sequence[range]) -> bool:
            nonlocal calls
            calls += 1
            return sum(map(int.__mul__, map(len, stages), (2, 1))) <= 16

        assert cut_layers([[1.0] * layers] * 4, shape, fits, kinds=[True] * layers) is None
        return calls

    assert asked(1536) <= 1.5 * asked(96)
