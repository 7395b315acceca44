"""kill -9 in the middle of a run, resume, and nothing differs by a bit from a run that was left alone."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from tests.distributed.chosen import cases
from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import train
from tests.fixtures.tiny_run import write_tiny_config

pytestmark = pytest.mark.slow

STEPS = 20
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}


def kill_at_step(config: Path, run: Path, step: int) -> None:
    """Starts an attempt, kills its launcher once ``step`` was logged, and waits until its ranks died with it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*launch, "m6", "pretrain", str(config), "--run-dir", str(run)]
    with subprocess.Popen(command, env=ENVIRONMENT) as launcher:
        try:
            while not any(entry["step"] >= step for entry in entries(run)):
                assert launcher.poll() is None, f"the run ended before step {step}"
                time.sleep(0.005)
            ranks = psutil.Process(launcher.pid).children()
        finally:
            launcher.kill()
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive, "ranks outlive their launcher"


def train_until_killed(document: dict[str, Any], root: str, step: int) -> None:
    """Kills its own process once ``step`` was logged, wherever the training is then."""

    def wait() -> None:
        while not any(entry["step"] >= step for entry in entries(Path(root))):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    train(document, root)


def entries(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def numbers(run: Path) -> list[tuple]:
    """What a run learned and reported, without its times."""
    keys = (
        "step",
        "loss",
        "aux_loss",
        "objectives",
        "learning_rate",
        "grad_norm",
        "tokens_seen",
        "validation",
        "experts",
    )
    return [tuple((key, entry.get(key)) for key in keys) for entry in entries(run)]


LAYOUTS: dict[str, dict[str, Any]] = {
    "experts": {"zero_optimization__stage": 2, "m6__training__ep_size": 2},
    "late gradients": {
        "zero_optimization__stage": 2,
        "m6__gradient_delay": {"accept_loss": True},
        "m6__offload": {"device_budget_mib": 2000.0, "rules": [{"kind": "expert", "place": "stream"}]},
    },
    "stages": {
        "zero_optimization__stage": 1,
        "m6__model__num_layers": 4,
        "m6__parallel__pipeline": {"num_ranks": 2, "schedule": "zbv"},
    },
}


# Late gradients in a checkpoint: test_gradient_delay.py, by day, too.
@pytest.mark.parametrize("layout", cases(LAYOUTS, {"late gradients"}))
def test_a_killed_run_resumes_to_the_bit(tmp_path: Path, layout: str):
    """Once with a launcher that is killed and takes its ranks with it; all else starts sooner without one."""
    config = write_tiny_config(
        tmp_path,
        **LAYOUTS[layout],
        m6__training__total_steps=STEPS,
        m6__checkpoint__interval_steps=4,
        m6__evaluation__interval_steps=10,
    )
    document, killed_run = json.loads(config.read_text()), tmp_path / "killed"
    run_distributed(train, 2, document, str(tmp_path / "whole"))
    if layout == "experts":
        kill_at_step(config, killed_run, 9)
    else:
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            run_distributed(train_until_killed, 2, document, str(killed_run), 9)
    assert entries(killed_run)[-1]["step"] < STEPS
    run_distributed(train, 2, document, str(killed_run))

    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    whole, killed = (
        CheckpointReader(complete_checkpoints(tmp_path / name / "checkpoints")[-1]) for name in ("whole", "killed")
    )
    assert whole.shapes.keys() == killed.shapes.keys()
    assert {kind for _, kind in whole.shapes} == {"weight", "exp_avg", "exp_avg_sq"}
    for name, kind in whole.shapes:
        assert torch.equal(whole.read(name, kind), killed.read(name, kind)), (name, kind)
