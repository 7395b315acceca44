"""One command under every launcher: torchrun, deepspeed, and the environment that srun gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.spawn import free_port, run_distributed
from tests.distributed.test_training_layouts import train
from tests.fixtures.tiny_run import write_tiny_config

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
PYTHON = [sys.executable, "-m"]


def losses(run: Path) -> list[float]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]


def start(command: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        command, env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*processes: subprocess.Popen) -> None:
    try:
        for process in processes:
            output, _ = process.communicate()
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_config(tmp_path_factory.mktemp("launchers"))


@pytest.fixture(scope="module")
def alone(config: Path) -> list[float]:
    run = config.parent / "alone"
    run_distributed(train, 1, json.loads(config.read_text()), str(run))  # starts sooner than the command
    return losses(run)


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "srun"])
def test_two_ranks_learn_what_one_does(config: Path, alone: list[float], launcher: str):
    run = config.parent / launcher
    command = ["m6", "pretrain", str(config), "--run-dir", str(run)]
    if launcher == "torchrun":
        options = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        finish(start([*PYTHON, *options, *command]))
    elif launcher == "deepspeed":
        options = ["deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(free_port()), "--module"]
        finish(start([*PYTHON, *options, *command]))
    else:
        # What srun sets for each task; MASTER_* come from the job script.
        job = {"SLURM_NTASKS": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            start([*PYTHON, *command], SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), **job) for rank in range(2)
        ]
        finish(*ranks)
    # fp32 sums in another order
    assert losses(run) == pytest.approx(alone, rel=1e-5)
