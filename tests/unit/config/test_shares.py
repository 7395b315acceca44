"""How the micro-batches of a step are divided over ranks, and what a refusal advises."""

import ast
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m6.config.pipeline import PipelineSettings
from m6.config.shares import Division, shortened
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
        if shares := re.search(r"m6\.parallel\.shares=(\[.*?\])", advice):
            replace(division, stated=tuple(ast.literal_eval(shares[1]))).check("train_batch_size", samples)
        if "leave it out" in advice:
            replace(division, stated=None).check("train_batch_size", samples)
        if size := re.search(r"train_micro_batch_size_per_gpu (\d+)", advice):
            replace(division, stated=None, micro_batch_size=int(size[1])).check("train_batch_size", samples)
        if batch := re.search(r"train_batch_size (\d+)", advice):
            replace(division, stated=None).check("train_batch_size", int(batch[1]))
        assert advice
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
