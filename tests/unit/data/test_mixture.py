import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m6.data.order import BLOCK, OPEN_BLOCKS, Mixture

WEIGHTS = {("denoise", "news"): 0.35, ("denoise", "poems"): 0.15, ("model", "news"): 0.2, ("caption", "shapes"): 0.3}
SIZES = {"news": 130, "poems": 7, "shapes": 1}


BLOCKS = {source: [size] for source, size in SIZES.items()}
# More blocks than are open at once, so that it is read in lanes.
LARGE = {**BLOCKS, "news": [3, 5] * OPEN_BLOCKS}


def mixture(seed=5):
    return Mixture(WEIGHTS, BLOCKS, seed)


def test_proportions_are_exact_in_every_block():
    for block in range(3):
        draws = [mixture().draw(block * BLOCK + i) for i in range(BLOCK)]
        counts = collections.Counter((d.objective, d.source) for d in draws)
        assert counts == {pair: round(weight * BLOCK) for pair, weight in WEIGHTS.items()}


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_blocks_are_full_and_nothing_is_left_out(weights):
    pairs = {(f"o{i}", "s"): weight for i, weight in enumerate(weights)}
    mixed = Mixture(pairs, {"s": [10]}, 0)
    size = mixed.block_size
    counts = collections.Counter(mixed._cells[cell][0] for cell in mixed._block(0)[0])
    total = sum(weights)
    assert sum(counts.values()) == size
    for (objective, _), weight in pairs.items():
        # The guaranteed single sample of tiny weights comes out of the others.
        assert abs(counts[objective] - weight / total * size) < 1 + len(weights)
        assert counts[objective] >= 1


def test_every_epoch_of_a_source_is_a_permutation_over_all_objectives():
    draws = [mixture().draw(i) for i in range(2 * BLOCK)]
    orders = {}
    for source, size in SIZES.items():
        mine = sorted((d for d in draws if d.source == source), key=lambda d: d.position)
        assert [d.position for d in mine] == list(range(len(mine)))
        rows = [mixture().row(draw) for draw in mine]
        epochs = [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]
        assert len(epochs) > 1
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        orders[source] = {tuple(epoch) for epoch in epochs}
    assert len(orders["news"]) == 2 * 550 // 130  # no epoch repeats the order of another


def test_draws_are_pure():
    numbers = [3, 2999, 0, 1500, 3, 999, 1000]
    shared = mixture()
    assert [shared.draw(n) for n in numbers] == [mixture().draw(n) for n in numbers]
    assert [mixture(6).draw(n) for n in numbers] != [mixture(5).draw(n) for n in numbers]


def test_seeds_of_samples_differ():
    shared = mixture()
    assert len({shared.draw(i).seed for i in range(2 * BLOCK)}) == 2 * BLOCK


def test_a_small_source_has_its_share_beside_a_large_one():
    """A block of 1,000 samples with one of the poems would read each of them 200 times while the web is read once."""
    sizes = {"web": 10**9, "poems": 5000}
    mixed = Mixture({("model", source): float(size) for source, size in sizes.items()}, {}, 0)
    assert mixed.block_size == 10**6
    assert mixed.rows_per_block == {"poems": 5, "web": 999_995}
    several = Mixture({("model", source): share for source, share in (("a", 0.9993), ("b", 0.0007))}, {}, 0)
    assert (several.block_size, several.rows_per_block) == (100_000, {"a": 99_930, "b": 70})
    just = Mixture({("model", source): share for source, share in (("a", 0.999), ("b", 0.001))}, {}, 0)
    assert just.block_size == BLOCK


def test_longer_blocks_hold_their_counts_too():
    weights = {("model", "news"): 0.9996, ("model", "poems"): 0.0004}
    mixed = Mixture(weights, {"news": LARGE["news"], "poems": [7]}, 5, samples_per_step=8)
    draws = [mixed.draw(number) for number in range(mixed.block_size)]
    assert collections.Counter(draw.source for draw in draws) == {"news": 99_960, "poems": 40}
    positions = collections.defaultdict(list)
    for draw in draws:
        positions[draw.lane, draw.source].append(draw.position)
    assert all(own == list(range(len(own))) for own in positions.values())


def test_more_pairs_than_samples_of_a_short_block():
    pairs = {("o", str(number)): 1.0 for number in range(BLOCK + 1)}
    assert set(Mixture(pairs, {}, 0).rows_per_block.values()) <= {99, 100}


@pytest.mark.parametrize(("samples_per_step", "lanes"), [(64, 64), (48, 16), (320, 64), (7, 1)])
def test_lanes_are_contiguous_parts_of_a_step_and_count_their_own_positions(samples_per_step, lanes):
    mixed = Mixture(WEIGHTS, LARGE, 5, samples_per_step)
    positions = collections.defaultdict(list)
    for number in range(3 * BLOCK // samples_per_step * samples_per_step):
        draw = mixed.draw(number)
        assert draw.lane == number % samples_per_step * lanes // samples_per_step
        positions[draw.lane, draw.source].append(draw.position)
    assert {lane for lane, _ in positions} == set(range(lanes))
    assert all(own == list(range(len(own))) for own in positions.values())


def test_lanes_hold_the_right_proportions_together():
    mixed = Mixture(WEIGHTS, LARGE, 5, samples_per_step=8)  # 8 lanes, of which each takes an eighth of a block
    for block in range(3):
        draws = [mixed.draw(block * BLOCK + i) for i in range(BLOCK)]
        counts = collections.Counter((d.objective, d.source) for d in draws)
        assert counts == {pair: round(weight * BLOCK) for pair, weight in WEIGHTS.items()}


def test_a_large_source_is_read_as_a_whole_in_an_epoch_of_its_lanes():
    mixed = Mixture({("model", "news"): 1.0}, {"news": LARGE["news"]}, 5, samples_per_step=16)
    size = sum(LARGE["news"])
    assert size % 16 == 0  # all lanes have the same number of rows
    epochs = [[mixed.row(mixed.draw(epoch * size + i)) for i in range(size)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_small_sources_have_the_same_order_in_any_step():
    draws = [[mixed.draw(i) for i in range(500)] for mixed in (mixture(), Mixture(WEIGHTS, BLOCKS, 5, 64))]
    assert draws[0] == draws[1]
