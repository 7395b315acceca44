"""How the micro-batches of a step are divided over ranks, and what a refusal advises."""

import ast
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m6.config.pipeline import PipelineSettings
from m6.config.shares import Division, exchange_neighbours, shortened
from m6.errors import UserError


@pytest.mark.parametrize(
    ("division", "samples", "shares"),
    [
        (Division(2, 4), 16, (2, 2, 2, 2)),
        (Division(2, 3), 16, (3, 3, 2)),
        (Division(2, 4, ep_size=2), 12, (2, 2, 1, 1)),
        (Division(2, 4, ep_size=2, at_once=2), 24, (4, 4, 2, 2)),
        (Division(2, 2, stated=(5, 3)), 16, (5, 3)),
        (Division(2, 4, stated=(3, 1)), 16, (3, 3, 1, 1)),
        (Division(2, 2, stated=(5, 3)), 10, (3, 2)),  # a batch of a ramp
        (Division(2, 3, stated=(9, 1, 1)), 6, (1, 1, 1)),
    ],
)
def test_shares(division: Division, samples: int, shares: tuple[int, ...]):
    division.check("train_batch_size", samples, is_final=False)
    assert division.shares(samples) == shares
    assert division.most(samples) == max(shares)


def test_the_shortest_list_has_the_same_shares():
    for shares, expected in (([3, 3, 1, 1], (3, 1)), ([3, 1, 1, 1], (3, 1, 1, 1)), ([5, 5, 5, 5, 1, 1], (5, 5, 1))):
        assert shortened(shares) == expected
        assert Division(1, len(shares), stated=expected).shares(sum(shares)) == tuple(shares)


@pytest.mark.parametrize(
    ("ep_size", "tensor_size", "expected"), [(1, 4, 1), (8, 4, 2), (2, 4, 1), (3, 2, 3), (10, 4, 5)]
)
def test_ranks_of_exchanges_that_overlap_have_equal_shares(ep_size: int, tensor_size: int, expected: int):
    """Each exchange is between ``ep_size`` neighbours of a stage; a brute search joins those that overlap."""
    neighbours = exchange_neighbours(ep_size, tensor_size)
    assert neighbours == expected
    group_of = {}  # along dp -> the first rank along dp of its exchanges
    for rank in range(2 * ep_size * tensor_size):
        first = rank // ep_size * ep_size // tensor_size
        group_of[rank // tensor_size] = min(group_of.get(first, first), group_of.get(rank // tensor_size, first))
    assert len(set(group_of.values())) == len(group_of) // neighbours


def test_the_advice_keeps_a_stated_accumulation():
    """Smaller micro-batches would be more of them, which the JSON forbids."""
    with pytest.raises(UserError, match=r"; try train_micro_batch_size_per_gpu 2, or train_batch_size 16$"):
        Division(4, 2).check("train_batch_size", 14)
    with pytest.raises(UserError, match=r"; try train_batch_size 16$"):
        Division(4, 2, accumulation=2).check("train_batch_size", 14)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Division, int]:
    ep_size = draw(st.integers(1, 3))
    ranks = ep_size * draw(st.integers(1, 3))
    pipeline = PipelineSettings(num_ranks=2) if draw(st.booleans()) else None
    stated = draw(st.none() | st.lists(st.integers(1, 6), min_size=2, max_size=6).map(tuple))
    equal_for = draw(st.sampled_from([(), ("zero_optimization.stage 2 adds up gradients",)]))
    at_once = 1 if pipeline else draw(st.integers(1, 2))
    division = Division(draw(st.integers(1, 3)), ranks, ep_size, at_once, stated, pipeline, equal_for)
    return division, draw(st.integers(1, 60))


@given(divisions())
def test_a_division_is_whole_or_its_advice_works(drawn: tuple[Division, int]):
    division, samples = drawn
    try:
        division.check("train_batch_size", samples)
    except UserError as error:
        advice = str(error).rpartition("; ")[2]
        found = re.findall(
            r"m6\.parallel\.shares=|leave it out|train_micro_batch_size_per_gpu \d+|train_batch_size \d+", advice
        )
        assert found or advice == "use fewer ranks"
        if shares := re.search(r"m6\.parallel\.shares=(\[.*?\])", advice):
            replace(division, stated=tuple(ast.literal_eval(shares[1]))).check("train_batch_size", samples)
        if "leave it out" in advice:
            replace(division, stated=None).check("train_batch_size", samples)
        if size := re.search(r"train_micro_batch_size_per_gpu (\d+)", advice):
            replace(division, stated=None, micro_batch_size=int(size[1])).check("train_batch_size", samples)
        if batch := re.search(r"train_batch_size (\d+)", advice):
            replace(division, stated=None).check("train_batch_size", int(batch[1]))
        return
    shares = division.shares(samples)
    assert sum(shares) * division.micro_batch_size == samples
    assert min(shares) >= 1
    assert len(shares) == division.ranks
    groups = [shares[first : first + division.ep_size] for first in range(0, division.ranks, division.ep_size)]
    assert all(len(set(group)) == 1 for group in groups)
    assert all(share % division.at_once == 0 for share in shares)
    if division.stated is None:
        assert max(shares) - min(shares) <= division.at_once
    if division.equal_for:
        assert len(set(shares)) == 1
