"""m6 status: what it reads from the folder of a run, with and without Slurm."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.fixtures.command import m6, user_error


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    (run / "slurm" / "attempts" / "0001").mkdir(parents=True)
    (run / "slurm" / "attempts" / "0002").mkdir()
    (run / "slurm" / "job").write_text("77\n")
    (run / "progress").write_text(json.dumps({"step": 45, "total_steps": 60, "time": time.time() - 36_000}))
    entry = {"step": 40, "loss": 3.25, "tokens_per_second": 12345.6, "step_time_s": 0.5}
    lines = [entry, {**entry, "step": 45, "loss": 3.125}, {"step": 45, "validation": {}}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, complete in ((20, True), (40, True), (45, False)):
        folder = run / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "manifest.json").write_text("{}")
    return run


def status(run: Path, **environment: str) -> dict[str, str]:
    outcome = m6("status", run, **environment)
    assert outcome.code == 0, outcome
    return dict(line.split(maxsplit=1) for line in outcome.stdout.splitlines())


def test_a_run_that_is_under_way(run: Path, tmp_path: Path):
    programs = tmp_path / "bin"
    programs.mkdir()
    lines = [
        "77|RUNNING|None|16|1:02:03|(null)",
        f"78|PENDING|(Dependency)|16|1-00:00:00|{run}",
        "79|RUNNING|None|1|9:00|/other",
    ]
    (programs / "squeue").write_text("\n".join(["#!/bin/bash", "cat <<END", *lines, "END\n"]))
    (programs / "squeue").chmod(0o755)
    found = status(run, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert found["state"] == "not finished"
    assert found["jobs"] == "77 RUNNING (16 nodes, 1:02:03 left); 78 PENDING ((Dependency))"
    assert found["attempts"].startswith("2, the last in ")
    assert found["step"] == "45 of 60, 10.0 h ago"
    assert found["loss"] == "3.1250 at step 45"
    assert found["speed"] == "12,346 tokens/s, 0.500 s/step"
    assert found["checkpoint"].startswith("step 40, ")
    assert "GiB free of" in found["disk"]
    # However the folder is called, the jobs are those that carry its name.
    found = status(run / ".." / "run", PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert found["run"] == str(run)
    assert "78 PENDING" in found["jobs"]


@pytest.mark.parametrize(
    ("name", "text", "state"),
    [
        ("DONE", "60\n", "finished at step 60"),
        ("FATAL", "loss nan\n", "failed loss nan"),
        ("STOP", "", "stop requested by a user"),
    ],
)
def test_how_a_run_ended(run: Path, name: str, text: str, state: str):
    (run / name).write_text(text)
    found = status(run, PATH="/nowhere")
    assert found["state"] == state
    assert found["jobs"] == "unknown: squeue is not available"


def test_no_run(tmp_path: Path):
    assert user_error("status", tmp_path) == f"{tmp_path}: holds no run"


def test_off_a_cluster(run: Path, tmp_path: Path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "squeue").write_text(
        "#!/bin/bash\necho 'squeue: error: fetch_config: DNS SRV lookup failed' >&2\nexit 1\n"
    )
    (programs / "squeue").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    assert status(run, PATH=path)["jobs"] == "unknown: squeue does not answer"
    # A run that was never submitted has no jobs to ask for.
    shutil.rmtree(run / "slurm")
    (run / "config.json").write_text("{}")
    found = status(run, PATH=path)
    assert "jobs" not in found
    assert found["loss"] == "3.1250 at step 45"
