"""Planned batches against every way to divide the requests."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m6.serving.batcher import CostTable, measure_costs, plan_by_arrival, plan_by_length


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to divide items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        for index, group in enumerate(smaller):
            yield [*smaller[:index], [first, *group], *smaller[index + 1 :]]
        yield [[first], *smaller]


def cost(batches: list[list[int]], lengths: list[int], seconds: CostTable) -> float:
    return sum(seconds(max(lengths[index] for index in batch), len(batch)) for batch in batches)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    measured=st.lists(st.floats(0.01, 10), min_size=12, max_size=12),
    max_batch_size=st.integers(1, 4),
)
def test_no_division_takes_less_time(lengths: list[int], measured: list[float], max_batch_size: int):
    seconds = CostTable([1, 5, 12], [1, 2, 3, 4], np.array(measured).reshape(3, 4))
    batches = plan_by_length(lengths, seconds, max_batch_size)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert max(map(len, batches)) <= max_batch_size
    allowed = (p for p in partitions(list(range(len(lengths)))) if max(map(len, p)) <= max_batch_size)
    best = min(cost(division, lengths, seconds) for division in allowed)
    # Sums of the same numbers in another order.
    assert cost(batches, lengths, seconds) == pytest.approx(best, rel=1e-12)


def test_lengths_are_kept_apart_where_padding_costs_more_than_a_batch_of_its_own():
    lengths = [100, 3, 2, 90, 4]
    assert plan_by_length(lengths, lambda length, size: 20 + length * size, 8) == [[2, 1, 4], [3, 0]]
    assert plan_by_length(lengths, lambda length, size: 1000 + length * size, 8) == [[2, 1, 4, 3, 0]]
    assert plan_by_length(lengths, lambda length, size: length * size, 8) == [[2], [1], [4], [3], [0]]


def test_nothing_waits():
    assert plan_by_length([], lambda length, size: 1.0, 4) == []
    assert plan_by_arrival([], 4) == []


def test_by_arrival_cuts_where_a_batch_is_full():
    assert plan_by_arrival([9, 1, 9, 1, 9], 2) == [[0, 1], [2, 3], [4]]


def test_costs_between_and_outside_of_what_was_measured():
    table = CostTable([2, 10], [1, 4], np.array([[1.0, 4.0], [3.0, 12.0]]))
    assert table(2, 1) == 1
    assert table(6, 1) == 2
    assert table(6, 2) == pytest.approx(2 + (8 - 2) / 3)
    assert table(1, 1) == 1
    assert table(50, 9) == 12


def test_noise_cannot_make_more_work_cheaper():
    table = CostTable([1, 2, 3], [1, 2], np.array([[2.0, 1.0], [1.0, 3.0], [1.5, 2.0]]))
    values = np.array([[table(length, size) for size in (1, 2)] for length in (1, 2, 3)])
    assert (np.diff(values, axis=0) >= 0).all()
    assert (np.diff(values, axis=1) >= 0).all()


def test_every_point_is_measured():
    calls = []
    table = measure_costs(lambda length, size: calls.append((length, size)), [1, 8], [1, 2], repeats=2)
    assert calls == [(1, 1), *((length, size) for length in (1, 8) for size in (1, 2) for _ in range(2))]
    assert table(8, 2) > 0
