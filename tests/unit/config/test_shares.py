"""How the micro-batches of a step are divided over ranks, and what a refusal advises."""

import ast
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m6.config.pipeline import PipelineSettings
from m6.config.shares import BatchSplit, shortened
from m6.errors import UserError


@pytest.mark.parametrize(
    ("split", "samples", "shares"),
    [
        (BatchSplit(2, 4), 16, (2, 2, 2, 2)),
        (BatchSplit(2, 3), 16, (3, 3, 2)),
        (BatchSplit(2, 4, ep_size=2), 12, (2, 2, 1, 1)),
        (BatchSplit(2, 4, ep_size=2, at_once=2), 24, (4, 4, 2, 2)),
        (BatchSplit(2, 4, ep_size=8, tensor_size=4), 12, (2, 2, 1, 1)),
        (BatchSplit(2, 2, stated=(5, 3)), 16, (5, 3)),
        (BatchSplit(2, 4, stated=(3, 1)), 16, (3, 3, 1, 1)),
        (BatchSplit(2, 2, stated=(5, 3)), 10, (3, 2)),  # a batch of a ramp
        (BatchSplit(2, 3, stated=(9, 1, 1)), 6, (1, 1, 1)),
    ],
)
def test_shares(split: BatchSplit, samples: int, shares: tuple[int, ...]):
    split.check("train_batch_size", samples, is_final=False)
    assert split.shares(samples) == shares
    assert split.most(samples) == max(shares)


def test_the_shortest_list_has_the_same_shares():
    for shares, expected in (([3, 3, 1, 1], (3, 1)), ([3, 1, 1, 1], (3, 1, 1, 1)), ([5, 5, 5, 5, 1, 1], (5, 5, 1))):
        assert shortened(shares) == expected
        assert BatchSplit(1, len(shares), stated=expected).shares(sum(shares)) == tuple(shares)


@pytest.mark.parametrize(
    ("ep_size", "tensor_size", "expected"), [(1, 4, 1), (8, 4, 2), (2, 4, 1), (3, 2, 3), (10, 4, 5)]
)
def test_ranks_of_exchanges_that_overlap_have_equal_shares(ep_size: int, tensor_size: int, expected: int):
    """Each exchange is between ``ep_size`` neighbours of a stage; a brute search joins those that overlap."""
    neighbours = BatchSplit(1, 2 * ep_size, ep_size, tensor_size).neighbours
    assert neighbours == expected
    group_of = {}  # along dp -> the first rank along dp of its exchanges
    for rank in range(2 * ep_size * tensor_size):
        first = rank // ep_size * ep_size // tensor_size
        group_of[rank // tensor_size] = min(group_of.get(first, first), group_of.get(rank // tensor_size, first))
    assert len(set(group_of.values())) == len(group_of) // neighbours


def test_a_refusal_names_all_sizes_of_an_exchange():
    split = BatchSplit(2, 4, ep_size=8, tensor_size=4, stated=(3, 1, 2, 2))
    sizes = r"m6\.training\.ep_size 8 with m6\.parallel\.tensor\.num_ranks 4"
    with pytest.raises(UserError, match=rf"gives 3, 1 to ranks 0 to 1 along dp, which exchange tokens \({sizes}\)"):
        split.check("train_batch_size", 16)
    with pytest.raises(UserError, match=rf"they come in 2 neighbours \({sizes}\), and the 4 ranks need 4 or more"):
        replace(split, stated=None).check("train_batch_size", 4)
    interleaved = replace(split, stated=None, at_once=3)
    with pytest.raises(UserError, match=rf"2 neighbours \({sizes}\) x overlap_micro_batches 3 = 6, and the 4 ranks"):
        interleaved.check("train_batch_size", 16)


def test_the_advice_keeps_a_stated_accumulation():
    """Smaller micro-batches would be more of them, which the JSON forbids."""
    with pytest.raises(UserError, match=r"; try train_micro_batch_size_per_gpu 2, or train_batch_size 16$"):
        BatchSplit(4, 2).check("train_batch_size", 14)
    with pytest.raises(UserError, match=r"; try train_batch_size 16$"):
        BatchSplit(4, 2, accumulation=2).check("train_batch_size", 14)


@st.composite
def splits(draw: st.DrawFn) -> tuple[BatchSplit, int]:
    ep_size, tensor_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks = BatchSplit(1, 1, ep_size, tensor_size).neighbours * draw(st.integers(1, 3))
    pipeline = PipelineSettings(num_ranks=2) if draw(st.booleans()) else None
    stated = draw(st.none() | st.lists(st.integers(1, 6), min_size=2, max_size=6).map(tuple))
    equal_for = draw(st.sampled_from([(), ("zero_optimization.stage 2 adds up gradients",)]))
    at_once = 1 if pipeline else draw(st.integers(1, 2))
    split = BatchSplit(draw(st.integers(1, 3)), ranks, ep_size, tensor_size, at_once, stated, pipeline, equal_for)
    return split, draw(st.integers(1, 60))


@given(splits())
def test_a_split_is_whole_or_its_advice_works(drawn: tuple[BatchSplit, int]):
    split, samples = drawn
    try:
        split.check("train_batch_size", samples)
    except UserError as error:
        advice = str(error).rpartition("; ")[2]
        found = re.findall(
            r"m6\.parallel\.shares=|leave it out|train_micro_batch_size_per_gpu \d+|train_batch_size \d+", advice
        )
        assert found or advice == "use fewer ranks"
        if shares := re.search(r"m6\.parallel\.shares=(\[.*?\])", advice):
            replace(split, stated=tuple(ast.literal_eval(shares[1]))).check("train_batch_size", samples)
        if "leave it out" in advice:
            replace(split, stated=None).check("train_batch_size", samples)
        if size := re.search(r"train_micro_batch_size_per_gpu (\d+)", advice):
            replace(split, stated=None, micro_batch_size=int(size[1])).check("train_batch_size", samples)
        if batch := re.search(r"train_batch_size (\d+)", advice):
            replace(split, stated=None).check("train_batch_size", int(batch[1]))
        return
    shares = split.shares(samples)
    assert sum(shares) * split.micro_batch_size == samples
    assert min(shares) >= 1
    assert len(shares) == split.ranks
    size = split.neighbours
    groups = [shares[first : first + size] for first in range(0, split.ranks, size)]
    assert all(len(set(group)) == 1 for group in groups)
    assert all(share % split.at_once == 0 for share in shares)
    if split.stated is None:
        assert max(shares) - min(shares) <= split.at_once
    if split.equal_for:
        assert len(set(shares)) == 1
