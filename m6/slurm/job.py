"""What a job asks of Slurm: one small JSON, written by hand or by ``m6 plan --out``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, PositiveInt, model_validator

from m6.errors import UserError
from m6.validation import Section, parse_json, validate

# Slurm looks at its clock once a minute, so that a signal may come this much before its time.
SIGNAL_EARLY_S = 60


class JobDescription(Section):
    """The resources of a job, and the site's names for where it may run."""

    nodes: PositiveInt = Field(description="nodes of the job")
    ranks_per_node: PositiveInt = Field(description="processes on a node; with GPUs one for each")
    gpus_per_node: int = Field(0, ge=0, description="GPUs of a node; 0 trains on CPUs")
    cpus_per_rank: PositiveInt = Field(description="cores of a rank, its data workers included")
    memory_gb_per_node: int = Field(0, ge=0, description="host memory in GiB; 0 is all that a node has")
    exclusive: bool = Field(True, description="whether no other job may share the nodes")
    time_limit_min: PositiveInt = Field(description="wall-clock limit of one job in minutes")
    signal_lead_s: PositiveInt = Field(
        description="how long before the limit Slurm asks to stop: the longest step, the write of a checkpoint, and "
        f"{SIGNAL_EARLY_S} s in reserve"
    )
    partition: str | None = Field(None, description="Slurm's partition")
    account: str | None = Field(None, description="Slurm's account")
    constraint: str | None = Field(None, description="features that the nodes must have")
    shared_folders: list[str] = Field(
        default_factory=list,
        description="folders that all nodes share; empty: whatever lies on a network file system",
    )

    @model_validator(mode="after")
    def _check(self) -> JobDescription:
        if self.gpus_per_node not in (0, self.ranks_per_node):
            raise ValueError(
                f"gpus_per_node {self.gpus_per_node} with ranks_per_node {self.ranks_per_node}; a rank has one GPU, so "
                "the two are equal, or gpus_per_node is 0"
            )
        if self.time_limit_min * 60 <= self.signal_lead_s + SIGNAL_EARLY_S:
            raise ValueError(
                f"time_limit_min {self.time_limit_min} leaves no time to train: Slurm asks to stop signal_lead_s "
                f"{self.signal_lead_s} before the limit, and up to {SIGNAL_EARLY_S} s earlier"
            )
        return self

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def options(self) -> list[str]:
        """The options of sbatch that ask for this."""
        options = [
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks_per_node}",
            f"--cpus-per-task={self.cpus_per_rank}",
            f"--mem={self.memory_gb_per_node}G" if self.memory_gb_per_node else "--mem=0",
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


def load_job(path: Path) -> JobDescription:
    """Reads and validates the description of a job.

    Raises:
        UserError: for a file that cannot be read, a wrong key, or values that contradict each other.
    """
    try:
        return validate(JobDescription, parse_json(path.read_text(encoding="utf-8")), "")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: {error}") from None
