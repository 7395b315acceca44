"""A plan as files: the run's JSON and the request of its Slurm job, one job for each phase if their layouts differ."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m6.errors import UserError
from m6.files import write_json, write_text
from m6.planning.cost.memory import checkpoint_bytes, copied_bytes
from m6.planning.search.configuration import configured
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout
from m6.slurm.job import SIGNAL_EARLY_S, JobDescription
from m6.validation import validate

_MARGIN_S = 60
# Assumptions for profiles without a measurement: for one rank, and for the shared file system of all ranks.
_RANK_BYTES_PER_S, _JOB_BYTES_PER_S = 500e6, 50e9

# The shipped scripts have the same body; `m6 submit` needs no script.
_BODY = """\
# RUN_DIR=RUN sbatch THIS_FILE [OPTIONS OF m6 pretrain], in the folder of the repository
set -euo pipefail
source "${M6_ROOT:-$SLURM_SUBMIT_DIR}/scripts/slurm/job.sh"
"""


@dataclass(frozen=True)
class JobFiles:
    """The files of one job.

    Attributes:
        name: DIR/name.json, DIR/name.job.json and DIR/name.sbatch.
        document: the run's JSON with the plan's layout, validated as by ``m6 pretrain``.
        job: the request.
    """

    name: str
    document: dict[str, Any]
    job: JobDescription

    def write(self, folder: Path) -> None:
        """Writes the files."""
        write_json(folder / f"{self.name}.json", self.document)
        write_json(folder / f"{self.name}.job.json", self.job.model_dump(exclude_defaults=True))
        config = shlex.quote(str((folder / f"{self.name}.json").absolute()))
        header = sbatch_header(self.job, self.name)
        write_text(folder / f"{self.name}.sbatch", f'#!/usr/bin/env bash\n{header}{_BODY}train {config} "$@"\n')


def job_files(stages: list[Planner], plans: list[PricedLayout], name: str, time_limit_min: int) -> list[JobFiles]:
    """The jobs of a run: one, or one for each phase if their layouts differ.

    The job of the Pseudo phase ends at the switch. The job of the Real phase resumes the same run in its own layout.

    Args:
        stages: of ``training_stages``.
        plans: one for each phase.

    Raises:
        UserError: see ``job_description``.
    """
    if len({plan.layout for plan in plans}) == 1:
        # One job trains the run to its end. It needs the host memory and the time of the larger phase, the last one.
        stages, plans, names = stages[-1:], plans[-1:], [name]
    else:
        names = [f"{name}.pseudo", f"{name}.real"]
    found = []
    for stage, plan, each in zip(stages, plans, names, strict=True):
        document = configured(stage.config, plan.layout).document
        if section := document["m6"].get("pseudo_to_real"):
            section.pop("stop_at_switch", None)
            if stage.memory.sharing is not None:
                section["stop_at_switch"] = True
        found.append(JobFiles(each, document, job_description(stage, plan, time_limit_min)))
    return found


def checkpoint_s(planner: Planner, plan: PricedLayout) -> float:
    """Seconds of writing a checkpoint, at the measured rate or an assumed one."""
    assumed = min(_RANK_BYTES_PER_S, _JOB_BYTES_PER_S / planner.cluster.num_devices)
    return checkpoint_bytes(planner.memory, plan.layout) / (planner.profile.checkpoint_bytes_per_s or assumed)


def signal_lead_s(planner: Planner, plan: PricedLayout) -> int:
    """Seconds between the job's signal and its end, in whole minutes.

    They are enough for a checkpoint in progress, a step, the last checkpoint, and a margin.
    """
    return math.ceil((plan.time.total + 2 * checkpoint_s(planner, plan) + SIGNAL_EARLY_S + _MARGIN_S) / 60) * 60


def job_description(planner: Planner, plan: PricedLayout, time_limit_min: int) -> JobDescription:
    """The request of the plan's job, for ``m6 submit --job``.

    Raises:
        UserError: the cluster mixes types of nodes, and one job cannot request several; or ``time_limit_min`` leaves no
            time to train before the signal.
    """
    if len(planner.cluster.nodes) > 1:
        raise UserError(f"{planner.cluster.name} mixes types of nodes: one job cannot ask for them")
    nodes = planner.cluster.nodes[0]
    per_node = nodes.devices_per_node
    copied = copied_bytes(planner.memory, plan.layout)
    on_host = planner.host_bytes(plan.layout) + per_node * (plan.footprint.host_process + copied)
    if nodes.links.host is None:  # a CPU: the ranks compute in host memory
        on_host += per_node * plan.footprint.peak
    # At least half of a node: data and the page cache need memory, too.
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
    return validate(JobDescription, document, "")


def sbatch_header(job: JobDescription, name: str) -> str:
    """The request as ``#SBATCH`` lines."""
    always = ["--requeue", "--open-mode=append", "--output=%x_%j.log"]
    return "".join(f"#SBATCH {option}\n" for option in [f"--job-name={name}", *job.options(), *always])
