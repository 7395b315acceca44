"""The section m6.parallel.tensor: what it refuses, and which ranks it puts together."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.checks import check_world_size
from m6.config.run import RunConfig, parse_config
from m6.errors import UserError
from m6.training.mesh import ParallelDims
from m6.training.train_step import micro_batch_numbers
from tests.fixtures.tiny_run import tiny_document

ONE: dict[str, Any] = {"num_ranks": 2}
SQUARE: dict[str, Any] = {"num_ranks": 4, "placement": "2d"}
CUBE: dict[str, Any] = {"num_ranks": 8, "placement": "3d"}


def run(folder: Path, tensor: dict[str, Any], stage: int = 1, **changes: Any) -> RunConfig:
    changes = {"m6__moe": None, "m6__model__num_attention_heads": 8, "train_batch_size": 16, **changes}
    changes.setdefault("zero_optimization", {"stage": stage})
    return parse_config(tiny_document(folder, m6__parallel__tensor=tensor, **changes))


REFUSED = {
    "one rank": ({"num_ranks": 1}, {}, r"m6\.parallel\.tensor\.num_ranks: .*2"),
    "unknown placement": ({**ONE, "placement": "4d"}, {}, r"m6\.parallel\.tensor\.placement"),
    "no square": ({"num_ranks": 6, "placement": "2d"}, {}, r'num_ranks 6 is no square.*use 4, or "1d"'),
    "no cube": ({"num_ranks": 4, "placement": "3d"}, {}, r'num_ranks 4 is no cube.*use 8, or "1d"'),
    "heads": ({"num_ranks": 16}, {}, r"divides m6\.model\.num_attention_heads by 16, but it is 8; use 8"),
    "inner size": (
        {"num_ranks": 4},
        {"m6__model__ffn_hidden_size": 66},
        r"m6\.model\.ffn_hidden_size by 4, but it is 66; use 2",
    ),
    "divided tokens of a square": (
        {**SQUARE, "sequence_parallel": True},
        {},
        r'sequence_parallel with placement "2d".*use placement "1d"',
    ),
    "blocks of a cube": (CUBE, {"m6__model__ffn_hidden_size": 66}, r"ffn_hidden_size by 4.*no num_ranks fits"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str):
    tensor, changes, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        run(tmp_path, tensor, **changes)


def test_shared_experts_are_divided_by_all_ranks(tmp_path: Path):
    """Also where a square divides the dense feed-forwards by its side alone."""
    moe = {"num_experts": 4, "num_shared_experts": 1}
    run(tmp_path, SQUARE, m6__model__ffn_hidden_size=66)
    with pytest.raises(UserError, match=r"divides m6\.model\.ffn_hidden_size by 4, but it is 66"):
        run(tmp_path, SQUARE, m6__model__ffn_hidden_size=66, m6__moe=moe)


def test_ranks_that_read_the_same(tmp_path: Path):
    """Neighbours divide matrices; a step has the micro-batches that one rank would have."""
    config = run(tmp_path, ONE)
    assert config.accumulation_steps(4) == 4
    with pytest.raises(UserError, match=r"num_ranks 2 does not divide the world size 3; start 4 ranks"):
        check_world_size(config, 3)
    check_world_size(config, 4)
    staged = run(tmp_path, ONE, m6__parallel__pipeline={"num_ranks": 2}, m6__model__num_layers=4)
    with pytest.raises(UserError, match=r"num_ranks 2 does not divide the 3 ranks that hold the same stage.*start 8"):
        check_world_size(staged, 6)
    check_world_size(staged, 8)
    places = [ParallelDims(rank, 4, tp=2) for rank in range(4)]
    assert [(each.dp_rank, each.tp_rank, each.is_data_leader) for each in places] == [
        (0, 0, True),
        (0, 1, False),
        (1, 0, True),
        (1, 1, False),
    ]
    numbers = [micro_batch_numbers(config, each, config.batch_split(4), 0) for each in places]
    assert numbers[0] == numbers[1]
    assert sorted(numbers[0] + numbers[2]) == list(range(8))
