"""A run of the real trainer on the local cluster, and what a test does to it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from m6.checkpoints.discovery import complete_checkpoints
from m6.slurm.submission import plan_submission, submit
from tests.fixtures.tiny_run import tiny_document, write_tiny_config
from tests.slurm.cluster import LocalCluster, send, wait_until

STEPS, INTERVAL = 50, 10
MIDDLE = 15  # a step between two checkpoints
# Between two looks at all processes of the machine: several scenarios look, and each look takes milliseconds.
_LOOK_S = 0.25
# What a run learned and reported, without its times.
_NUMBERS = (
    "step",
    "loss",
    "aux_loss",
    "objectives",
    "learning_rate",
    "grad_norm",
    "samples_seen",
    "tokens_seen",
    "experts",
)
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "")


# Every job on this cluster: this interpreter, the loopback device, and what its own run asks for.
_SITE = f"""
PATH={Path(sys.executable).parent}:$PATH
export GLOO_SOCKET_IFNAME=lo DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TMPDIR=$RUN_DIR.tmp
mkdir -p "$TMPDIR"
export MIN_SHM_GB=0 MIN_HOST_MEMORY_GB=0
WATCH_INTERVAL_S=1 PREFLIGHT_TIMEOUT_S=300 MIN_DISK_GB=0
source "$RUN_DIR.env"
"""


@contextlib.contextmanager
def jobs_go_to(cluster: LocalCluster, folder: Path) -> Iterator[None]:
    """Inside ``with``, what is submitted goes to a local cluster; ``folder`` gets the data and the site's settings."""
    tiny_document(folder)  # builds the data
    (folder / "cluster.env").write_text(_SITE, encoding="utf-8")
    environment = {"SLURM_CONF": cluster.environment["SLURM_CONF"], "M6_CLUSTER_ENV": str(folder / "cluster.env")}
    with mock.patch.dict(os.environ, environment):
        yield


class ClusterRun:
    """A folder, a configuration, and the job that is training it.

    Args:
        folder: of the tests on one cluster: holds the data and all runs.
        environment: lines of bash that this run's jobs find in their cluster.env.
        changes: to the tiny configuration, see ``tiny_document``.
    """

    def __init__(self, cluster: LocalCluster, folder: Path, name: str, environment: str = "", **changes: Any) -> None:
        self.cluster, self.folder, self.root = cluster, folder, folder / "runs" / name
        self.root.parent.mkdir(exist_ok=True)
        changes = {"m6__training__total_steps": STEPS, "m6__checkpoint__interval_steps": INTERVAL, **changes}
        changes.setdefault("m6__evaluation__interval_steps", 100_000)
        self.config = write_tiny_config(folder, f"{name}.json", **changes)
        self.root.with_suffix(".env").write_text(environment, encoding="utf-8")
        self.job = ""

    def submit(self, nodes: int = 2, chain: int = 1, array: int = 0, **description: Any) -> list[str]:
        """Queues the run's jobs; ``job`` is the first of them."""
        document = {
            "nodes": nodes,
            "ranks_per_node": 1,
            "cpus_per_rank": 1,
            "memory_gb_per_node": 1,
            "exclusive": False,
            "time_limit_min": 30,
            "signal_lead_s": 60,
            "shared_folders": [str(self.folder)],
            **description,
        }
        path = self.root.with_suffix(".cluster.json")
        path.write_text(json.dumps(document), encoding="utf-8")
        jobs = submit(plan_submission(self.config, (), path, self.root, chain, array))
        self.job = jobs[0]
        return jobs

    def entries(self, last_bytes: int = 2**40) -> list[dict[str, Any]]:
        """The lines of RUN/metrics.jsonl that are complete, of the whole file or of its end."""
        path = self.root / "metrics.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - last_bytes))
            if size > last_bytes:
                file.readline()
            return [json.loads(line) for line in file if line.endswith(b"\n")]

    def curve(self) -> list[tuple[Any, ...]]:
        return [tuple(entry[name] for name in _NUMBERS) for entry in self.entries() if "loss" in entry]

    def newest_checkpoint(self) -> int:
        return max(self.checkpoints(), default=0)

    def step(self) -> int:
        """The last step whose metrics are written."""
        entries = self.entries(last_bytes=4096)
        return entries[-1]["step"] if entries else 0

    def checkpoints(self) -> list[int]:
        return [int(path.name.removeprefix("step_")) for path in complete_checkpoints(self.root / "checkpoints")]

    def attempts(self) -> list[Path]:
        return sorted((self.root / "slurm" / "attempts").glob("[0-9]*"))

    def log(self) -> str:
        """What the run's jobs and, after them, its ranks said."""
        files = [*sorted(self.root.glob("slurm/*.log")), *sorted(self.root.glob("slurm/attempts/*/rank_*.log"))]
        return "\n".join(f"== {file}\n{file.read_text(encoding='utf-8', errors='replace')}" for file in files)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.step() >= step, f"step {step}")

    def wait_for_ranks(self, count: int = 2) -> dict[int, int]:
        self.wait_until(lambda: len(self.ranks()) == count, f"{count} ranks", interval_s=_LOOK_S)
        return self.ranks()

    def wait_for_no_ranks(self) -> None:
        self.wait_until(lambda: not self.ranks(), "the end of the ranks", interval_s=_LOOK_S)

    def wait_for_attempt(self, number: int) -> None:
        self.wait_until(lambda: len(self.attempts()) >= number, f"attempt {number}")

    def hold_until_attempt(self, process: int, number: int) -> None:
        """Keeps a rank stopped until there is another attempt: the watchdog's SIGCONT may reach it more than once."""

        def held() -> bool:
            if process in self.ranks().values():
                send(process, signal.SIGSTOP)
            return len(self.attempts()) >= number

        self.wait_until(held, f"attempt {number}")

    def wait_for_end(self, job: str = "") -> str:
        """The state in which a job of the run ended."""
        job = job or self.job
        self.wait_until(lambda: self.cluster.state(job) in _OVER, f"the end of job {job}", interval_s=1.0)
        return self.cluster.state(job)

    def wait_for_file(self, name: str) -> None:
        self.wait_until((self.root / name).exists, name)

    def ranks(self) -> dict[int, int]:
        """Rank to process id, of the running attempt."""
        return self.cluster.ranks(self.root)

    def ask_to_stop(self, job: str = "") -> None:
        """The signal that Slurm sends before the time limit."""
        with contextlib.suppress(RuntimeError):  # scancel 22.05 fails for an array's task, though the signal arrives
            self.cluster.run("scancel", "--batch", "--signal=USR2", job or self.job)

    def wait_for_stop(self) -> None:
        """Returns once the run's first job says that it was asked to stop."""
        job_log = next(self.root.glob("slurm/*.log"))
        self.wait_until(lambda: "asked to stop" in job_log.read_text(), "the stop")

    @contextlib.contextmanager
    def held(self, step: int = MIDDLE) -> Iterator[None]:
        """Inside ``with`` the run's two ranks stand still after a step: what is done to it does not come too late."""
        self.wait_for_step(step)
        processes = self.wait_for_ranks().values()
        for process in processes:
            send(process, signal.SIGSTOP)
        yield
        for process in processes:
            send(process, signal.SIGCONT)

    def set_time_limit(self, minutes: int) -> None:
        self.cluster.run("scontrol", "update", f"JobId={self.job}", f"TimeLimit={minutes}")

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Sends a signal to a rank; returns its process id."""
        process = self.wait_for_ranks()[rank]
        send(process, number)
        return process

    def kill_all(self) -> None:
        """Kills every rank, and returns when they are gone."""
        processes = set(self.ranks().values())
        for process in processes:
            send(process, signal.SIGKILL)
        ended = "the end of the ranks"
        self.wait_until(lambda: not processes & set(self.ranks().values()), ended, interval_s=_LOOK_S)

    def wait_until(self, condition: Callable[[], object], what: str, interval_s: float = 0.05) -> None:
        """Returns once ``condition()`` is true; an error shows what the run's jobs and ranks said."""
        try:
            wait_until(condition, f"{what} of {self.root.name}", interval_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log()}") from None


MakeRun = Callable[..., ClusterRun]
"""Makes a run of this name: ``make_run(name, environment="", **changes)``, see ClusterRun."""
