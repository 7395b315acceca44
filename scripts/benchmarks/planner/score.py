"""Scores the planner's predictions of the measured cases: ``python -m scripts.benchmarks.planner.score``.

Reads results/planner_cpu.csv and the machine's calibration, results/planner_cpu_profile.json, which ``m6 plan
calibrate`` made. The profile's factors are fitted to the cases marked "fit", as ``m6 plan validate --refit`` fits them
to runs.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from m6.config import load_config
from m6.planning.activations import BatchShape
from m6.planning.cluster import load_cluster
from m6.planning.profile import Profile
from m6.planning.search import Plan, Planner
from scripts.benchmarks.planner.cases import CASES, CONFIG, Case
from scripts.benchmarks.planner.measure import TABLE
from scripts.benchmarks.record import RESULTS

PROFILE = RESULTS / "planner_cpu_profile.json"
_SHAPE = ("rows", "sequence_length", "real", "targets", "pictures")


@dataclass(frozen=True)
class Measured:
    """A case with what was measured in all rounds.

    Attributes:
        step_s: of every step the least of all rounds, of these the median.
        memory_bytes: of the fullest rank.
    """

    case: Case
    shape: BatchShape
    step_s: float
    memory_bytes: float
    wall_s: float
    cores: int
    loads: tuple[float, ...]


def read_measured() -> list[Measured]:
    found = []
    for case in CASES:
        rows = [row for row in TABLE.rows() if row["case"] == case.name]
        if not rows:
            continue
        steps = zip(*([float(value) for value in row["steps_s"].split()] for row in rows), strict=True)
        shape = BatchShape(case.layout.micro_batch_size, *(int(rows[0][name]) for name in _SHAPE))
        found.append(
            Measured(
                case,
                shape,
                statistics.median(min(values) for values in steps),
                max(float(row["memory_bytes"]) for row in rows if row["memory_bytes"]),
                min(float(row["wall_s"]) for row in rows),
                int(rows[0]["cores"]),
                tuple(float(row["load"]) for row in rows),
            )
        )
    return found


def predict(measured: Measured, profile: Profile) -> Plan:
    """What ``m6 pretrain --profile`` would have said."""
    case = measured.case
    settings = tuple(f"{key}={json.dumps(value)}" for key, value in case.overrides().items())
    cluster = load_cluster(Path("cpu_laptop"))
    nodes = cluster.nodes[0]
    host = nodes.host.model_copy(update={"cpus": measured.cores})
    nodes = nodes.model_copy(update={"devices_per_node": case.layout.world_size, "host": host})
    cluster = cluster.model_copy(update={"nodes": [nodes]})
    planner = Planner(load_config(Path(CONFIG), settings), cluster, profile, measured.shape)
    return Plan(case.layout, planner.memory(case.layout), planner.time(case.layout))
