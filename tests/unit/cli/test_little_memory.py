"""Commands in a small address space: it suffices, or it is refused before anything is written."""

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m6.cli.process import needed_bytes
from tests.fixtures.tiny_run import write_tiny_config

NEEDED_MIB = needed_bytes() >> 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("little_memory")


def command(folder: Path, name: str) -> list[str]:
    """A command whose result is ``folder / "out"``."""
    config = write_tiny_config(folder)
    commands = {
        "pretrain": ["pretrain", config, "--run-dir", folder / "out", "--set", "m6.training.total_steps=2"],
        "build": ["data", "build", f"own={folder / 'texts'}", "--licence", "private", "--out", folder / "out"],
        "plan": ["plan", "best", config, "--cluster", "cpu_laptop", "--out", folder / "out"],
    }
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("今天下雨。" * 2000, encoding="utf-8")
    return [str(part) for part in commands[name]]


def outcome_of(folder: Path, name: str, mebibytes: int) -> subprocess.CompletedProcess[str]:
    limit = mebibytes << 20
    return subprocess.run(
        [sys.executable, "-m", "m6", *command(folder, name)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )


@pytest.mark.parametrize("name", ["pretrain", "build", "plan"])
@pytest.mark.parametrize("mebibytes", [300, NEEDED_MIB - 1])
def test_an_address_space_too_small_for_the_libraries_is_refused(folder: Path, name: str, mebibytes: int):
    outcome = outcome_of(folder, name, mebibytes)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    found = f"limited to {mebibytes:,} MiB (ulimit -v)"
    expected = f"{found}, and m6 with its libraries needs at least {NEEDED_MIB:,} MiB on this machine"
    assert outcome.stderr == f"error: the address space is {expected}; run ulimit -v unlimited first\n"
    assert not (folder / "out").exists()


@pytest.mark.parametrize("name", ["pretrain", "build", "plan"])
def test_a_small_address_space_suffices(folder: Path, name: str):
    outcome = outcome_of(folder, name, NEEDED_MIB)
    assert outcome.returncode == 0, outcome.stderr[-2000:]
    shutil.rmtree(folder / "out")
