"""What a launcher says of this process in the environment: its rank, the number of ranks, and how they lie on nodes.

It is read before torch is imported, so that a configuration that does not fit the ranks is refused at once.
"""

from __future__ import annotations

import os

# The variables of torchrun and deepspeed, and those of srun with the same meaning.
_RANK_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def is_under_srun() -> bool:
    """Whether srun started this process, and not another launcher inside of a job."""
    # SLURM_PROCID alone is not enough: an interactive shell that srun started has it too.
    return "RANK" not in os.environ and "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ


def rank_variables() -> dict[str, str]:
    """The variables of torchrun, also where another launcher, or none, started this process."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if is_under_srun():
        alone = {name: os.environ[slurm_name] for name, slurm_name in _RANK_VARIABLES.items()}
    return {name: os.environ.get(name, value) for name, value in alone.items()}


def world_size_of_environment() -> int:
    """The number of ranks that the launcher started; needs no process group."""
    return int(rank_variables()["WORLD_SIZE"])


def is_main_of_environment() -> bool:
    """Whether the launcher made this process rank 0; needs no process group."""
    return int(rank_variables()["RANK"]) == 0


def ranks_per_node(world_size: int) -> int:
    """The most ranks of ``world_size`` that the launcher starts on a node, or all if it does not say so.

    Needs no process group.
    """
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # of torchrun and deepspeed, inside of a job of Slurm, too
        if name in os.environ:
            return int(os.environ[name])
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if name in os.environ:  # such as 8(x3),4: 8 tasks on each of 3 nodes and 4 on another
            # A process that srun did not start has the variables of its job.
            return min(world_size, max(int(part.split("(")[0]) for part in os.environ[name].split(",")))
    return world_size
