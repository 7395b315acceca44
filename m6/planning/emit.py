"""A plan as files: the run's JSON, and what its job asks of the cluster."""

from __future__ import annotations

import math
from typing import Any

from m6.errors import UserError
from m6.planning.layout import configured
from m6.planning.search import Plan, Planner
from m6.slurm.description import SIGNAL_EARLY_S, ClusterDescription
from m6.validation import validate

_MARGIN_S = 60
_CHECKPOINT_BYTES_PER_S = 500e6  # of one rank, where nothing was measured


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
    return math.ceil((plan.time.total + checkpoint_s(planner, plan) + SIGNAL_EARLY_S + _MARGIN_S) / 60) * 60


def job_description(planner: Planner, plan: Plan, time_limit_min: int) -> ClusterDescription:
    """What the job asks of one kind of node, as ``m6 submit --cluster`` takes it.

    Raises:
        UserError: the cluster mixes kinds of nodes, which one job cannot ask for; or the signal's lead leaves no
            time to train.
    """
    if len(planner.cluster.nodes) > 1:
        raise UserError(f"{planner.cluster.name} mixes kinds of nodes: one job cannot ask for them")
    nodes = planner.cluster.nodes[0]
    per_node = nodes.devices_per_node
    on_host = per_node * (plan.footprint.host + plan.footprint.host_process)
    if nodes.links.host is None:
        on_host += per_node * plan.footprint.peak
    memory = min(nodes.host.memory_bytes, max(2 * on_host, nodes.host.memory_bytes // 2))
    document = {
        "nodes": nodes.count,
        "ranks_per_node": per_node,
        "gpus_per_node": 0 if nodes.links.host is None else per_node,
        "cpus_per_rank": max(1, nodes.host.cpus // per_node),
        "memory_gb_per_node": math.floor(memory / 2**30),
        "time_limit_min": time_limit_min,
        "signal_lead_s": signal_lead_s(planner, plan),
    }
    return validate(ClusterDescription, document, "")


def sbatch_header(job: ClusterDescription, name: str) -> str:
    """The same as ``#SBATCH`` lines, for a job script of one's own."""
    always = ["--requeue", "--open-mode=append", "--output=%x_%j.log"]
    return "".join(f"#SBATCH {option}\n" for option in [f"--job-name={name}", *job.options(), *always])
