"""A full disk, files that may not grow, a clock that jumps, no memory: one message, and nothing half-written."""

import itertools
import json
import resource
import time
from pathlib import Path

import pytest
import torch

from tests.fixtures.command import Outcome, m6
from tests.fixtures.fabricated_run import training_entry, write_metrics, write_run_and_data
from tests.fixtures.full_disk import full_disk, growing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full_disk")
    write_run_and_data(folder)
    write_metrics(folder / "run", [training_entry(step, {"language_modelling": 5.0}) for step in (1, 2)])
    rows = ({"text": f"第{number}句话。"} for number in range(50))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def commands(folder: Path, out: Path) -> dict[str, tuple[object, ...]]:
    tokenizer = ("data", "tokenizer", folder / "data", "--out", out, "--vocab-size", 400, "--image-vocab-size", 16)
    return {
        "build": ("data", "build", f"rows={folder / 'rows.jsonl'}", "--licence", "private", "--out", out),
        "tokenizer": tokenizer,
        "export": ("export", folder / "run", "--hf", out),
        "plot": ("plot", folder / "run", "--out", out / "curves.png"),
        "plan": ("plan", "best", "configs/m6_smoke.json", "--cluster", "cpu_laptop", "--out", out),
    }


NAMES = ["build", "tokenizer", "export", "plot", "plan"]


def files(out: Path) -> dict[str, bytes]:
    """The files of a command's output by name; a batch script names the folder that it lies in."""
    if out.is_file():
        return {"": out.read_bytes()}
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return {name: content.replace(str(out).encode(), b"OUT") for name, content in found.items()}


@pytest.fixture(params=NAMES)
def command(request: pytest.FixtureRequest, folder: Path) -> str:
    return str(request.param)


@pytest.fixture
def whole(command: str, folder: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files that the command writes where nothing goes wrong."""
    outcome = m6(*commands(folder, tmp_path / "whole" / "out")[command])
    assert outcome.code == 0, outcome
    return files(tmp_path / "whole" / "out")


def assert_clean(outcome: Outcome, out: Path, whole: dict[str, bytes], command: str) -> None:
    """One message, no traceback, only complete files and nothing beside them."""
    assert outcome.code in (1, 2), outcome
    assert "Traceback" not in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("error: "), outcome.stderr
    assert sum(line.startswith("error: ") for line in outcome.stderr.splitlines()) == 1, outcome.stderr
    found = files(out)
    assert found.items() <= whole.items()
    if command in ("build", "export"):
        assert found in ({}, whole)
    if out.parent.exists():
        assert [path.name for path in out.parent.iterdir() if path != out] == []


@pytest.mark.slow
def test_a_disk_that_is_full_at_some_write(folder: Path, tmp_path: Path, command: str, whole: dict[str, bytes]):
    for number in growing():
        out = tmp_path / f"at_{number}" / "out"
        with full_disk(number) as calls:
            outcome = m6(*commands(folder, out)[command])
        if len(calls) <= number:
            assert (outcome.code, files(out)) == (0, whole)
            assert number > 2, "the command wrote something"
            return
        assert_clean(outcome, out, whole, command)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0, 1, 1000, 10_000])
def test_files_that_may_not_grow(folder: Path, tmp_path: Path, command: str, whole: dict[str, bytes], limit: int):
    """By the kernel, which also stops what C++ writes."""
    out = tmp_path / "limited" / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        outcome = m6(*commands(folder, out)[command])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if limit < max(map(len, whole.values())):
        assert_clean(outcome, out, whole, command)
    else:
        assert (outcome.code, files(out)) == (0, whole)


def test_a_clock_that_jumps(
    folder: Path, tmp_path: Path, command: str, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    clock, jumps = time.time, itertools.cycle([0, -86400, 86400 * 365, -86400 * 365 * 20])
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    outcome = m6(*commands(folder, tmp_path / "jumping" / "out")[command])
    assert (outcome.code, files(tmp_path / "jumping" / "out")) == (0, whole), outcome


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory:\nyou tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_memory_that_ends_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail(run: Path) -> str:
        raise error

    monkeypatch.setattr("m6.slurm.status.describe_status", fail)
    outcome = m6("status", folder / "run")
    assert (outcome.code, outcome.stdout, outcome.stderr.count("\n")) == (1, "", 1)
    assert outcome.stderr.startswith("error: out of memory: ")


def test_other_errors_of_the_program_are_not_hidden(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(run: Path) -> str:
        raise RuntimeError("a defect")

    monkeypatch.setattr("m6.slurm.status.describe_status", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        m6("status", folder / "run")
