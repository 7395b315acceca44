"""The description of a Slurm job: a small JSON file, written by hand or by ``m6 plan --out``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt, model_validator

from m6.runs.environment import DISTRIBUTION
from m6.shipped import shipped_file
from m6.validation import Section, read_model

# Slurm checks its timers once a minute, so a signal can arrive this much too early.
SIGNAL_EARLY_S = 60


class JobDescription(Section):
    """The resources of a job, and the site's partition, account and constraint.

    Raises:
        ValueError: gpus_per_node does not match ranks_per_node, or the time limit leaves no time for training.
    """

    nodes: PositiveInt = Field(description="number of nodes")
    ranks_per_node: PositiveInt = Field(description="processes per node; with GPUs, one per GPU")
    gpus_per_node: int = Field(0, ge=0, description="GPUs per node; 0: train on CPUs")
    cpus_per_rank: PositiveInt = Field(description="cores per rank, including its data workers")
    memory_gb_per_node: int = Field(0, ge=0, description="host memory per node in GiB; 0: all of it")
    exclusive: bool = Field(True, description="whether the nodes are not shared with other jobs")
    time_limit_min: PositiveInt = Field(description="wall-clock limit of one job in minutes")
    signal_lead_s: PositiveInt = Field(
        description="seconds before the limit at which Slurm signals the job to stop; enough for the longest step, two "
        f"checkpoints, one of which may be under way, and {SIGNAL_EARLY_S} s in reserve"
    )
    partition: str | None = Field(None, description="Slurm's partition")
    account: str | None = Field(None, description="Slurm's account")
    constraint: str | None = Field(None, description="features that the nodes must have")
    shared_folders: list[str] = Field(
        default_factory=list,
        description="folders that all nodes share; empty: every folder on a network file system",
    )

    @model_validator(mode="after")
    def _check(self) -> JobDescription:
        if self.gpus_per_node not in (0, self.ranks_per_node):
            raise ValueError(
                f"gpus_per_node {self.gpus_per_node} with ranks_per_node {self.ranks_per_node}; a rank has one GPU, so "
                "both must be equal, or gpus_per_node must be 0"
            )
        if self.time_limit_min * 60 <= self.signal_lead_s + SIGNAL_EARLY_S:
            raise ValueError(
                f"time_limit_min {self.time_limit_min} leaves no time to train: Slurm asks to stop signal_lead_s "
                f"{self.signal_lead_s} before the limit, and up to {SIGNAL_EARLY_S} s earlier"
            )
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    def options(self, bounds: tuple[int, int] | None = None) -> list[str]:
        """Returns the options of sbatch for these resources.

        Args:
            bounds: fewest and most nodes; Slurm gives as many as are free. None: exactly ``nodes``.
        """
        # "B:" sends the signal only to the batch script. The script forwards it to the ranks.
        options = [
            *(self._tasks() if bounds is None else self._tasks_between(*bounds)),
            f"--mem={self.memory_gb_per_node}G" if self.memory_gb_per_node else "--mem=0",  # 0: all memory of a node
            DISTRIBUTION,
            f"--time={self.time_limit_min}",
            f"--signal=B:USR2@{self.signal_lead_s}",
        ]
        if self.gpus_per_node:
            options.append(f"--gpus-per-node={self.gpus_per_node}")
        if self.exclusive:
            options.append("--exclusive")
        for name in ("partition", "account", "constraint"):
            if value := getattr(self, name):
                options.append(f"--{name}={value}")
        return options

    def _tasks(self) -> list[str]:
        tasks = [f"--ntasks-per-node={self.ranks_per_node}", f"--cpus-per-task={self.cpus_per_rank}"]
        return [f"--nodes={self.nodes}", *tasks]

    def _tasks_between(self, fewest: int, most: int) -> list[str]:
        # With tasks per node, Slurm 22.05 computes the job's tasks from the fewest nodes and gives no more nodes than
        # these tasks need. With one large task per node it gives all free nodes; the job then divides the task.
        return [f"--nodes={fewest}-{most}", f"--cpus-per-task={self.ranks_per_node * self.cpus_per_rank}"]


def load_job(path: Path) -> JobDescription:
    """Reads and validates a job description, a file or the name of a shipped one.

    Raises:
        UserError: the file cannot be read, a key or value is wrong, or values contradict each other.
    """
    return read_model(JobDescription, shipped_file(path, "job"))
