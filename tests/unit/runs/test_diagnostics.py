"""SIGQUIT asks a rank where it stands, whatever it is doing; and which signals ask it to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from m6.runs.signals import stopping_signals

STUCK = """
import os, time
from m6.runs.signals import answer_sigquit
answer_sigquit()
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
def waiting_for_another_rank():
    print("stuck", flush=True)
    time.sleep(600)
waiting_for_another_rank()
"""


def test_a_rank_that_is_stuck_tells_where(tmp_path: Path):
    environment = {
        **os.environ,
        "M6_ATTEMPT_DIR": str(tmp_path),
        "SLURM_PROCID": "3",
        "TORCH_FR_BUFFER_SIZE": "100",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "STORE": str(tmp_path / "store"),
    }
    (tmp_path / "stuck.py").write_text(STUCK)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "stuck.py"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGQUIT)
    path = tmp_path / "flight_recorder_00003.json"
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text().endswith("}")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None, "to be asked is not to be ended"
    process.kill()
    _, said = process.communicate()
    assert "waiting_for_another_rank" in said
    assert [entry["profiling_name"] for entry in json.loads(path.read_text())["entries"]] == ["gloo:all_reduce"]


def test_sigterm_in_a_step_of_srun_means_now(monkeypatch: pytest.MonkeyPatch):
    """Another rank has failed: a save would wait for it."""
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert signal.SIGTERM in stopping_signals()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert signal.SIGTERM not in stopping_signals()
    assert signal.SIGUSR2 in stopping_signals()
