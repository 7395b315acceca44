"""Batches that grow: a function of the step alone, and what it cannot be combined with."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.batch_ramp import BatchRampStage, BatchSizes
from m6.config.checks import check_world_size
from m6.config.run import parse_config
from m6.errors import UserError
from m6.training.mesh import ParallelDims
from m6.training.train_step import micro_batch_numbers
from tests.fixtures.tiny_run import tiny_document

RAMP = [{"steps": 2, "batch_size": 4}, {"steps": 1, "batch_size": 8}]
BATCHES = {"train_batch_size": 16, "m6__training__batch_ramp": RAMP, "m6__training__total_steps": 6}


def test_samples_of_a_step_and_before_it():
    sizes = BatchSizes([BatchRampStage(steps=2, batch_size=4), BatchRampStage(steps=1, batch_size=8)], 16)
    assert [sizes.of(step) for step in range(5)] == [4, 4, 8, 16, 16]
    assert [sizes.before(step) for step in range(6)] == [0, 4, 8, 16, 32, 48]
    assert BatchSizes([], 16).before(3) == 48


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_micro_batch_is_computed_once_in_the_order_of_the_steps(tmp_path: Path, ranks: int):
    config = parse_config(tiny_document(tmp_path, **BATCHES))
    split = config.batch_split(ranks)
    of_steps = [
        [n for rank in range(ranks) for n in micro_batch_numbers(config, ParallelDims(rank, ranks), split, step)]
        for step in range(6)
    ]
    assert [number for numbers in of_steps for number in numbers] == list(range((2 * 4 + 8 + 3 * 16) // 2))
    assert [len(numbers) for numbers in of_steps] == [2, 2, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m6__training__batch_ramp": RAMP[::-1]}, "expected growing batches below train_batch_size 16, found 8, 4"),
        ({"train_batch_size": 8}, "expected growing batches below train_batch_size 8, found 4, 8"),
        ({"m6__training__total_steps": 3}, "has 3 steps, but the run has m6.training.total_steps 3"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        parse_config(tiny_document(tmp_path, **{**BATCHES, **changes}))


def test_every_rank_has_a_part_of_every_batch(tmp_path: Path):
    config = parse_config(tiny_document(tmp_path, **BATCHES))
    check_world_size(config, 2)
    with pytest.raises(UserError, match="batch_size 4: it makes 2 micro-batches of 2, fewer than the 4 ranks"):
        check_world_size(config, 4)
