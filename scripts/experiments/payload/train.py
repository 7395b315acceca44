"""Trains a tiny M6 with every number format of the exchange: four ranks as two nodes of two, node first.

From the root of the repository, with the data of README.md:

    torchrun --nproc-per-node 4 -m scripts.experiments.payload.train --seeds 3

Adds a row to results.csv per finished run and leaves out the runs that have one.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from pathlib import Path

from m6.config.run import load_config
from m6.runs.processes import start
from scripts.experiments.experiment import ResultTable, code_version, train_on_ranks

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
        config = load_config(CONFIG, (*SETTINGS, f'm6.moe.dispatch_dtype="{payload}"', f"m6.training.seed={seed}"))
        if lines := train_on_ranks(config, runtime):
            curve = [line["loss"] for line in lines if "loss" in line]
            validation = next(line["validation"] for line in lines if "validation" in line)
            row = {"payload": payload, "seed": seed, "code": code, "training": statistics.mean(curve[-WINDOW:])}
            row |= {name: validation[name] for name in sorted(validation)}
            means = [statistics.mean(curve[at : at + WINDOW]) for at in range(0, STEPS, WINDOW)]
            table.append({**row, "curve": " ".join(f"{mean:.4f}" for mean in means)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    main(parser.parse_args().seeds)
