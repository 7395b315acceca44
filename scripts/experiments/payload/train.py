"""Trains a tiny M6 with every number format of the exchange: four ranks as two nodes of two, node first.

From the root of the repository, with the data of README.md:

    torchrun --nproc-per-node 4 -m scripts.experiments.payload.train --seeds 3

Adds a row to results.csv per finished run and leaves out the runs that have one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from itertools import product
from pathlib import Path

import torch.distributed as dist

from m6.config.run import load_config
from m6.runs.processes import start
from m6.training.loop import pretrain
from scripts.experiments.experiment import ResultTable, code_version

FOLDER = Path(__file__).resolve().parent
CONFIG = FOLDER.parent / "prototyping" / "config.json"
RESULTS = FOLDER / "results.csv"
PAYLOADS = ("same", "bfloat16", "float8", "float8_both")
STEPS, WINDOW = 300, 50
# The exchange of the large recipes: many prototypes, room for one choice a token, node first.
SETTINGS = (
    "train_micro_batch_size_per_gpu=4",
    "m6.training.ep_size=4",
    f"m6.training.total_steps={STEPS}",
    "m6.moe.num_prototypes=4",
    'm6.moe.capacity_rule="1"',
    "m6.moe.min_capacity=1",
    "m6.moe.ranks_per_node=2",
    'm6.moe.exchange="all_to_all"',
    f"m6.evaluation.interval_steps={STEPS}",
    f"m6.checkpoint.interval_steps={STEPS}",
    "m6.logging.interval_steps=1",
)


def main(seeds: int) -> None:
    """Trains what is missing in results.csv; all formats of one seed come before the next seed."""
    table, runtime, code = ResultTable(RESULTS, ("payload", "seed")), start(), code_version()
    for seed, payload in product(range(seeds), PAYLOADS):
        if table.holds({"payload": payload, "seed": seed}):
            continue
        folders = [tempfile.mkdtemp()] if runtime.is_main else [""]
        dist.broadcast_object_list(folders, src=0)
        run = Path(folders[0]) / "run"
        config = load_config(CONFIG, (*SETTINGS, f'm6.moe.payload="{payload}"', f"m6.training.seed={seed}"))
        if not pretrain(config, run, runtime):
            raise SystemExit(f"stopped by a signal in {run}")
        if runtime.is_main:
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            curve = [line["loss"] for line in lines if "loss" in line]
            validation = next(line["validation"] for line in lines if "validation" in line)
            row = {"payload": payload, "seed": seed, "code": code, "training": statistics.mean(curve[-WINDOW:])}
            row |= {name: validation[name] for name in sorted(validation)}
            means = [statistics.mean(curve[at : at + WINDOW]) for at in range(0, STEPS, WINDOW)]
            table.append({**row, "curve": " ".join(f"{mean:.4f}" for mean in means)})
            shutil.rmtree(run.parent)
        dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    main(parser.parse_args().seeds)
