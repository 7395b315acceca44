"""The launcher's environment variables: the rank of this process, the number of ranks, and their placement on nodes.

The variables are read before torch is imported, so a configuration unfit for the ranks is refused at once.

The planner assumes that neighbouring ranks share a node. Experts are split over neighbouring ranks, in a pipeline over
those of one stage; stages are farthest apart. swCaffe (arXiv 1903.06934) numbers ranks for the same reason: large
messages stay within a supernode.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby

from m6.config.run import RunConfig
from m6.data.workers import usable_cores
from m6.errors import UserError

# The variables of torchrun and deepspeed, and the variables of srun with the same meaning.
_RANK_VARIABLES = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def is_under_srun() -> bool:
    """Whether srun started this process, and not another launcher inside of a job."""
    # SLURM_PROCID alone is not enough: an interactive shell of srun has it too.
    return "RANK" not in os.environ and "SLURM_PROCID" in os.environ and "MASTER_ADDR" in os.environ


def rank_variables() -> dict[str, str]:
    """The variables of torchrun, also where another launcher, or none, started this process.

    Raises:
        UserError: they are no numbers, or RANK is not below WORLD_SIZE.
    """
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if is_under_srun():
        alone = {name: os.environ[slurm_name] for name, slurm_name in _RANK_VARIABLES.items()}
    variables = {name: os.environ.get(name, value) for name, value in alone.items()}
    for name, value in variables.items():
        if not (value.isascii() and value.isdigit()):
            raise UserError(f"{name} is {value!r}; expected a number, as torchrun, deepspeed and srun set it")
    if not int(variables["RANK"]) < int(variables["WORLD_SIZE"]):
        raise UserError(
            f"RANK is {variables['RANK']} and WORLD_SIZE {variables['WORLD_SIZE']}; expected a RANK from 0 to "
            "WORLD_SIZE - 1, each once"
        )
    return variables


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


def cores_per_rank() -> int:
    """The cores of this process. Ranks without bound cores share the cores of their node."""
    return min(usable_cores(), max(1, (os.cpu_count() or 1) // ranks_per_node(world_size_of_environment())))


DISTRIBUTION = "--distribution=block:block"
"""The option of sbatch and srun for filling one node, and one socket, after the other."""


def misplacement(config: RunConfig, nodes: Sequence[str]) -> str | None:
    """Describes how the placement of ranks differs from the planner's assumption; None if it does not.

    A run's results are the same on any placement, also with the hierarchical exchange between nodes.

    Args:
        nodes: the name of the node of each rank.
    """
    if not (reason := _misplaced_ranks(config, nodes)):
        return None
    ep_size = config.m6.training.ep_size
    per_node = -(-len(nodes) // len(set(nodes)))
    spread, assumed = (
        _groups_on_several_nodes(names, ep_size) for names in (nodes, [rank // per_node for rank in range(len(nodes))])
    )
    groups = f"; {spread} of {len(nodes) // ep_size} groups of experts are on several nodes instead of {assumed}"
    return (
        f"{reason}; m6 plan assumes that each node has as many neighbouring ranks (srun {DISTRIBUTION}, as m6 submit "
        f"asks for), so steps may take longer than it says{groups if ep_size > 1 else ''}"
    )


def _misplaced_ranks(config: RunConfig, nodes: Sequence[str]) -> str:
    blocks = [(name, len(list(ranks))) for name, ranks in groupby(nodes)]
    sizes = dict(blocks)
    if len(blocks) > len(sizes):
        name = next(name for name in sizes if sum(name == other for other, _ in blocks) > 1)
        ranks = [str(rank) for rank, other in enumerate(nodes) if other == name]
        shown = ", ".join(ranks[:4]) + (", ..." if len(ranks) > 4 else "")
        return f"node {name} has the ranks {shown}, which are no neighbours"
    if len(set(sizes.values())) > 1:
        fewest, most = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        return f"node {most} has {sizes[most]} ranks and node {fewest} has {sizes[fewest]}"
    per_node = blocks[0][1] if len(blocks) > 1 else 0
    first = 0 if config.m6.moe is None else config.model.moe_config().ranks_per_node or 0
    if per_node and first and max(first, per_node) % min(first, per_node):
        return f"m6.moe.ranks_per_node is {first}, but nodes have {per_node} ranks"
    return ""


def _groups_on_several_nodes(nodes: Sequence[object], ep_size: int) -> int:
    return sum(len(set(nodes[first : first + ep_size])) > 1 for first in range(0, len(nodes), ep_size))
