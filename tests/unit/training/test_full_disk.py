"""A training on a disk that is full at some write: a message, and what is there is good for the next attempt."""

import errno
import json
import os
from pathlib import Path

import pytest

from m6.checkpoints.discovery import complete_checkpoints, open_newest
from m6.config.run import parse_config
from m6.errors import UserError
from m6.runs.processes import Runtime
from m6.training.loop import pretrain
from tests.fixtures.full_disk import full_disk, growing
from tests.fixtures.tiny_run import tiny_document


def losses(root: Path) -> dict[int, float]:
    entries = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_a_disk_that_is_full_at_some_write(runtime: Runtime, folder: Path, tmp_path: Path, async_save: bool):
    changes = {"m6__training__total_steps": 2, "m6__checkpoint": {"interval_steps": 1, "async_save": async_save}}
    config = parse_config(tiny_document(folder, **changes))
    assert pretrain(config, tmp_path / "whole", runtime)
    for number in growing():
        root = tmp_path / f"at_{number}"
        with full_disk(number) as calls:
            try:
                pretrain(config, root, runtime)
                message = ""
            except (UserError, OSError) as error:  # the command line prints both in one line
                message = str(error)
        if len(calls) <= number:
            assert message == ""
            break
        assert os.strerror(errno.ENOSPC) in message
        newest, problems = open_newest(root / "checkpoints")
        assert not problems
        assert newest is not None or not complete_checkpoints(root / "checkpoints")
        assert pretrain(config, root, runtime), "the next attempt goes on"
        assert losses(root) == losses(tmp_path / "whole")
        assert [path.name for path in root.rglob("*") if path.suffix == ".tmp" or path.name == "lock"] == []
    assert number > 20, "the run wrote something"
