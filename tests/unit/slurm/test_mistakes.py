"""What a job hears of an attempt that ended with exit code 2."""

from pathlib import Path

import pytest

from m6.errors import StorageError, UserError
from tests.fixtures.command import m6


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("m6.data.path: wrong"), {"mistake": "m6.data.path: wrong\n"}),
        (StorageError("the disk is full"), {}),
        (FileNotFoundError(2, "no such file", "data"), {}),
    ],
    ids=["mistake", "disk", "file"],
)
def test_only_what_another_attempt_would_repeat(
    error: Exception, told: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(root: Path) -> str:
        raise error

    monkeypatch.setattr("m6.slurm.status.describe_status", fail)
    outcome = m6("status", tmp_path, M6_ATTEMPT_DIR=str(tmp_path))
    assert outcome.code == 2
    assert outcome.stderr == f"error: {error}\n"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == told


def test_the_node_that_saw_a_mistake_is_named(tmp_path: Path):
    environment = {"M6_ATTEMPT_DIR": str(tmp_path), "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "n7"}
    assert m6("status", tmp_path / "missing", **environment).code == 2
    assert (tmp_path / "mistake").read_text().endswith(" (said on n7)\n")
