"""What may differ between two attempts at a run, and what makes another run of it."""

from pathlib import Path
from typing import Any

import pytest

from m6.config.run import parse_config
from m6.errors import UserError
from m6.runs.directory import RunDirectory
from tests.fixtures.tiny_run import tiny_document


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has begun to train."""
    folder = RunDirectory(tmp_path / "run")
    folder.open(parse_config(tiny_document(tmp_path, train_batch_size=16)), 1)
    folder.metrics.touch()
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"m6__parallel": {"pipeline": {"num_ranks": 2}}},
        {"m6__communication": {"gradients": "chunks", "density": 0.5}},
        {"m6__elastic": {"max_nodes": 4}},
        {"m6__training__ep_size": 2},
        {"m6__training__max_skipped_steps": 50},
        {"m6__data__max_bad_row_share": 0.5},
        {"zero_optimization": {"stage": 1}},
    ],
    ids=str,
)
def test_another_layout_is_the_same_run(run: RunDirectory, tmp_path: Path, changes: dict[str, Any]):
    run.check(parse_config(tiny_document(tmp_path, train_batch_size=16, **changes)))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"m6__training__batch_ramp": [{"steps": 1, "batch_size": 8}]}, r"m6\.training\.batch_ramp"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu"),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, r"optimizer\.params"),
    ],
)
def test_what_is_learned_is_another_run(run: RunDirectory, tmp_path: Path, changes: dict[str, Any], key: str):
    with pytest.raises(UserError, match=rf"already holds another run \(its {key}"):
        run.check(parse_config(tiny_document(tmp_path, train_batch_size=16, **changes)))


def test_a_run_becomes_longer_unless_its_rows_are_shared_out(tmp_path: Path):
    """With max_epochs the weights of the mixture depend on the number of steps, and with them every row."""
    for limit in (None, 50):
        folder = RunDirectory(tmp_path / f"run {limit}")
        short, long = (
            parse_config(tiny_document(tmp_path, m6__data__max_epochs=limit, m6__training__total_steps=steps))
            for steps in (4, 8)
        )
        folder.open(short, 1)
        folder.metrics.touch()
        folder.check(short)
        if limit is None:
            folder.check(long)
        else:
            with pytest.raises(UserError, match=r"total_steps is 4, this one's is 8, and m6\.data\.max_epochs shares"):
                folder.check(long)
