"""The launcher's environment variables: the rank of this process, the number of ranks, and their placement on nodes.

They are read before torch is imported, so a configuration unfit for the ranks is refused at once.
"""

from __future__ import annotations

import os

# The variables of torchrun and deepspeed, and the variables of srun with the same meaning.
_RANK_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def is_under_srun() -> bool:
    """Whether srun started this process, and not another launcher inside of a job."""
    # SLURM_PROCID alone is not enough: an interactive shell of srun has it too.
    return "RANK" not in os.environ and "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ


def rank_variables() -> dict[str, str]:
    """The variables of torchrun, also where another launcher, or none, started this process."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if is_under_srun():
        alone = {name: os.environ[slurm_name] for name, slurm_name in _RANK_VARIABLES.items()}
    return {name: os.environ.get(name, value) for name, value in alone.items()}


def world_size_of_environment() -> int:
    """The number of ranks started by the launcher; needs no process group."""
    return int(rank_variables()["WORLD_SIZE"])


def is_main_of_environment() -> bool:
    """Whether the launcher made this process rank 0; needs no process group."""
    return int(rank_variables()["RANK"]) == 0


def ranks_per_node(world_size: int) -> int:
    """The largest number of ranks on a node by the launcher's variables, or ``world_size`` without such variables.

    Needs no process group.
    """
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # of torchrun and deepspeed, inside of a job of Slurm, too
        if name in os.environ:
            return int(os.environ[name])
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if name in os.environ:  # such as 8(x3),4: 8 tasks on each of 3 nodes and 4 on another
            # Without srun the variables are the job's, and may name more tasks than this run has ranks.
            return min(world_size, max(int(part.split("(")[0]) for part in os.environ[name].split(",")))
    return world_size
