import collections
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m6.data.mixture import BLOCK, Mixture, permuted
from m6.errors import UserError

WEIGHTS = {("denoise", "news"): 0.35, ("denoise", "poems"): 0.15, ("model", "news"): 0.2, ("caption", "shapes"): 0.3}
SIZES = {"news": 130, "poems": 7, "shapes": 1}


def mixture(seed=5):
    return Mixture(WEIGHTS, SIZES, seed)


@given(st.integers(1, 600), st.integers(0, 2**64 - 1))
def test_permuted_is_a_permutation(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_permuted_depends_on_the_key_and_looks_random():
    first, second = ([permuted(i, 1000, key) for i in range(1000)] for key in (1, 2))
    # A random permutation has one fixed point on average.
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
    assert sum(i == a for i, a in enumerate(first)) < 10
    steps = collections.Counter((b - a) % 1000 for a, b in itertools.pairwise(first))
    assert steps.most_common(1)[0][1] < 12


def test_proportions_are_exact_in_every_block():
    for block in range(3):
        draws = [mixture().draw(block * BLOCK + i) for i in range(BLOCK)]
        counts = collections.Counter((d.objective, d.source) for d in draws)
        assert counts == {pair: round(weight * BLOCK) for pair, weight in WEIGHTS.items()}


@settings(max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
def test_blocks_are_full_and_nothing_is_left_out(weights):
    pairs = {(f"o{i}", "s"): weight for i, weight in enumerate(weights)}
    mixed = Mixture(pairs, {"s": 10}, 0)
    counts = collections.Counter(mixed.draw(i).objective for i in range(BLOCK))
    total = sum(weights)
    for (objective, _), weight in pairs.items():
        # The guaranteed single sample of tiny weights comes out of the others.
        assert abs(counts[objective] - weight / total * BLOCK) < 1 + len(weights)
        assert counts[objective] >= 1


def test_every_epoch_of_a_source_is_a_permutation_over_all_objectives():
    draws = [mixture().draw(i) for i in range(2 * BLOCK)]
    orders = {}
    for source, size in SIZES.items():
        mine = sorted((d for d in draws if d.source == source), key=lambda d: d.position)
        assert [d.position for d in mine] == list(range(len(mine)))
        epochs = [[d.row for d in mine[i : i + size]] for i in range(0, len(mine) - size + 1, size)]
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


def test_too_many_pairs():
    with pytest.raises(UserError, match=f"{BLOCK + 1} pairs"):
        Mixture({("o", str(i)): 1.0 for i in range(BLOCK + 1)}, {str(i): 1 for i in range(BLOCK + 1)}, 0)
