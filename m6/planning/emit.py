"""A plan as files: the run's JSON, and the header of the job script."""

from __future__ import annotations

import math
from typing import Any

from m6.errors import UserError
from m6.planning.layout import configured
from m6.planning.search import Plan, Planner

_STOP_SIGNAL = "USR2"
_EARLY_S = 60  # Slurm sends a signal up to so much early
_MARGIN_S = 60
_CHECKPOINT_BYTES_PER_S = 500e6  # of one rank, where nothing was measured
_MEGA = 1 << 20


def run_document(planner: Planner, plan: Plan) -> dict[str, Any]:
    """The run's JSON with the plan's layout, accepted by the validation that ``m6 pretrain`` uses."""
    return configured(planner.config, plan.layout).document


def checkpoint_s(planner: Planner, plan: Plan) -> float:
    """Seconds of writing a checkpoint, at the profile's rate or an assumed one."""
    return checkpoint_bytes(planner, plan) / (planner.profile.checkpoint_bytes_per_s or _CHECKPOINT_BYTES_PER_S)


def checkpoint_bytes(planner: Planner, plan: Plan) -> float:
    """What one rank writes: fp32 weights and moments."""
    counts = planner.memory.counts(plan.layout).divided(plan.layout.tp_size)
    layout, config = plan.layout, planner.config
    owned = (counts.local - counts.experts) / layout.dp_size
    owned += counts.experts / (layout.dp_size // layout.ep_size)
    states = 12 if config.deepspeed.optimizer_type == "AdamW" else 4
    return owned * states


def signal_lead_s(planner: Planner, plan: Plan) -> int:
    """How long before its end a job must be told: a step, a checkpoint, Slurm's earliness and a margin."""
    return math.ceil((plan.time.total + checkpoint_s(planner, plan) + _EARLY_S + _MARGIN_S) / 60) * 60


def sbatch_header(planner: Planner, plan: Plan, name: str, time_limit: str) -> str:
    """The ``#SBATCH`` lines for one kind of node.

    Raises:
        UserError: the cluster mixes kinds of nodes, which one header cannot ask for.
    """
    if len(planner.cluster.nodes) > 1:
        raise UserError(f"{planner.cluster.name} mixes kinds of nodes: one sbatch header cannot ask for them")
    nodes = planner.cluster.nodes[0]
    per_node = nodes.devices_per_node
    on_host = per_node * (plan.footprint.host + plan.footprint.host_process)
    if nodes.links.host is None:
        on_host += per_node * plan.footprint.peak
    memory = min(nodes.host.memory_bytes, max(2 * on_host, nodes.host.memory_bytes // 2))
    lines = [
        f"--job-name={name}",
        f"--nodes={nodes.count}",
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={max(1, nodes.host.cpus // per_node)}",
        f"--mem={math.floor(memory / _MEGA)}M",
        f"--time={time_limit}",
        f"--signal=B:{_STOP_SIGNAL}@{signal_lead_s(planner, plan)}",
        "--requeue",
        "--open-mode=append",
        "--output=logs/%x.%j.out",
    ]
    if nodes.links.host is not None:
        lines.insert(3, f"--gpus-per-node={per_node}")
    return "\n".join(f"#SBATCH {line}" for line in lines) + "\n"
