"""What happens to runs whose layers lie on several ranks, as in scenarios.py."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.slurm.cluster import send
from tests.slurm.run import MIDDLE, ClusterRun, MakeRun

RANKS = 4
STEPS = 40
MAIN = "in _run_module_as_main"  # the last line of the main thread's stack, which is told last


def pipeline_left_alone(make_run: MakeRun) -> ClusterRun:
    run = _make(make_run, "pipeline_left_alone")
    run.submit(ranks_per_node=2)
    run.wait_for_end()
    return run


def pipeline_hang(make_run: MakeRun) -> tuple[ClusterRun, int]:
    """A rank of the last stage stands still in a training step, while it waits for no other rank."""
    run = _make(make_run, "pipeline_hang", "STEP_TIMEOUT_S=60 EVIDENCE_S=8")
    run.submit(ranks_per_node=2)
    run.wait_for_step(MIDDLE)
    process = run.wait_for_ranks(RANKS)[RANKS - 1]
    run.wait_until(lambda: _stops_computing(process), "a rank that computes")
    # To tell its stacks the rank is made to go on; the run would soon be over.
    said = run.attempts()[0] / f"rank_{RANKS - 1:05d}.log"
    run.wait_until(lambda: MAIN in said.read_text(encoding="utf-8"), "the stacks of the last rank")
    run.hold_until_attempt(process, 2)
    checkpoint = run.checkpoints()[-1]
    run.wait_for_end()
    return run, checkpoint


def _stops_computing(process: int) -> bool:
    """Stops a process, if it is not inside of a system call, where it would be if it waited for another one."""
    send(process, signal.SIGSTOP)
    computes = Path(f"/proc/{process}/syscall").read_text(encoding="ascii").startswith("-1 ")
    if not computes:
        send(process, signal.SIGCONT)
    return computes


def _make(make_run: MakeRun, name: str, environment: str = "") -> ClusterRun:
    """Two pipelines of two stages; a node has the ranks of a stage, and those of the last one seldom wait."""
    changes = {
        "m6__model__num_layers": 5,
        "m6__training__total_steps": STEPS,
        "m6__parallel__pipeline": {"num_ranks": 2, "schedule": "1f1b", "layers": [1, 4]},
        "train_batch_size": 16,
    }
    return make_run(name, environment, **changes)
