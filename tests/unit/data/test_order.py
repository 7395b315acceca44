import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m6.data.order import OPEN_BLOCKS, RowOrder, permuted


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


def lane_rows(size, lanes, lane):
    return range(size * lane // lanes, size * (lane + 1) // lanes)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=OPEN_BLOCKS + 1, max_size=4 * OPEN_BLOCKS), st.sampled_from([1, 2, 16, 64]))
def test_every_epoch_of_a_lane_is_a_permutation_of_its_rows(blocks, lanes):
    order = RowOrder(blocks, lambda epoch: epoch, lanes)
    for lane in {0, lanes // 2, lanes - 1}:
        expected = list(lane_rows(sum(blocks), lanes, lane))
        for epoch in range(2):
            begin = epoch * len(expected)
            assert sorted(order.row(begin + i, lane) for i in range(len(expected))) == expected


@pytest.mark.parametrize("lanes", [1, 4, 64])
def test_few_blocks_are_open_at_once_and_each_is_opened_once(lanes):
    blocks = [5, 3, 7] * 400
    block_of = np.repeat(np.arange(len(blocks)), blocks)
    order = RowOrder(blocks, lambda epoch: epoch, lanes)
    size, opened = sum(blocks), []
    for lane in range(lanes):
        read = [int(block_of[order.row(i, lane)]) for i in range(len(lane_rows(size, lanes, lane)))]
        seen = {block: (read.index(block), len(read) - read[::-1].index(block)) for block in set(read)}
        opened.append(max(sum(begin <= i < end for begin, end in seen.values()) for i in range(len(read))))
        # Neither in the order of the shards nor rows in their order.
        firsts = list(dict.fromkeys(read))
        assert sum(b - a == 1 for a, b in itertools.pairwise(firsts)) < len(firsts) / 4
    assert max(opened) <= OPEN_BLOCKS // lanes


def test_rows_of_open_blocks_are_mixed():
    blocks = [10] * 200
    order = RowOrder(blocks, lambda epoch: epoch)
    window = [order.row(i) // 10 for i in range(10 * OPEN_BLOCKS)]
    assert len(set(window)) == OPEN_BLOCKS
    # Ten rows of the same block one after the other would be no shuffle; by chance two neighbours share one in 64.
    assert sum(a == b for a, b in itertools.pairwise(window)) < len(window) / 20


def test_a_position_needs_no_history():
    make = lambda: RowOrder([4] * 100, lambda epoch: epoch + 7, 2)  # noqa: E731
    used = make()
    far = [used.row(position, 1) for position in (0, 1000, 3, 199, 200)]
    assert far == [make().row(position, 1) for position in (0, 1000, 3, 199, 200)]


def test_lanes_of_a_small_split_take_turns():
    order, alone = RowOrder([10, 11], lambda epoch: epoch, 4), RowOrder([10, 11], lambda epoch: epoch)
    turns = [order.row(position // 4, position % 4) for position in range(42)]
    assert turns == [alone.row(position) for position in range(42)]
    assert collections.Counter(turns) == dict.fromkeys(range(21), 2)
