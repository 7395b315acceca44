"""Commands in an address space that is too small: an exit code and a line, never a traceback; nothing half-written."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.tiny_run import write_tiny_config

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


@pytest.mark.parametrize("name", ["pretrain", "build", "plan"])
@pytest.mark.parametrize("mebibytes", [300, 1200, 3000])
def test_a_small_address_space(folder: Path, name: str, mebibytes: int):
    limit = mebibytes << 20
    outcome = subprocess.run(
        [sys.executable, "-m", "m6", *command(folder, name)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert "Traceback" not in outcome.stderr, outcome.stderr[-2000:]
    if outcome.returncode:
        assert outcome.stderr.strip(), outcome
        manifest = folder / "out" / "manifest.json"
        assert not manifest.exists() or json.loads(manifest.read_text(encoding="utf-8"))
