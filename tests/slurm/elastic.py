"""What happens to runs whose number of nodes changes, as in scenarios.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.slurm.run import ClusterRun, MakeRun

ROOT = Path(__file__).parents[2]
STEPS = 120
MIDDLE = 25  # a step between two checkpoints


def elastic(make_run: MakeRun) -> tuple[ClusterRun, ClusterRun]:
    return _nodes_come_and_go(make_run, "elastic", m6__training__deterministic="any_world")


def elastic_experts(make_run: MakeRun) -> tuple[ClusterRun, ClusterRun]:
    """With so many experts that to split them is faster on any number of nodes; and one layer, which no stages share:
    what the run measures on a busy machine could make them look faster."""
    return _nodes_come_and_go(make_run, "elastic_experts", m6__moe__num_experts=16, m6__model__num_layers=1)


def _nodes_come_and_go(make_run: MakeRun, name: str, **changes: Any) -> tuple[ClusterRun, ClusterRun]:
    """Up to 4 nodes, then 1 after a preemption, then 2 before a time limit; and the run without Slurm."""
    machine = json.loads((ROOT / "configs" / "clusters" / "cpu_laptop.json").read_text(encoding="utf-8"))
    link = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5, "source": "the loopback device"}
    machine["nodes"][0] |= {"count": 4, "devices_per_node": 1, "links": {"network": link}}
    changes["m6__training__total_steps"] = STEPS
    alone = make_run(f"{name}_alone", **changes)
    description = alone.folder / "cpu_nodes.json"
    description.write_text(json.dumps(machine), encoding="utf-8")
    run = make_run(name, **changes, m6__elastic={"max_nodes": 4, "cluster": str(description)})
    command = [sys.executable, "-m", "m6", "pretrain", str(alone.config), "--run-dir", str(alone.root)]
    with alone.root.with_suffix(".log").open("w") as log:
        ended = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def go_on(nodes: int) -> None:
        run.wait_until(lambda: run.cluster.state(run.job) == "PENDING", "the queue", interval_s=0.5)
        run.cluster.run("scontrol", "update", f"JobId={run.job}", f"NumNodes={nodes}-{nodes}")

    run.submit(nodes=4)
    run.wait_for_step(MIDDLE)
    run.cluster.run("scontrol", "requeue", run.job)
    go_on(1)
    begin = time.time()
    run.wait_until(lambda: any(entry["time"] > begin for entry in run.entries()), "a step on one node")
    run.wait_for_step(2 * MIDDLE)
    run.ask_to_stop()
    go_on(2)
    run.wait_for_end()
    ended.wait(600)
    return run, alone
