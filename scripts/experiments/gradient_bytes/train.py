"""Trains a small dense M6 on four ranks with every reducer of ``m6.communication``.

From the root of the repository, with the data of README.md:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m scripts.experiments.gradient_bytes.train --seeds 3

Adds a row to results.csv per finished run and leaves out the runs that have one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

from m6.config.run import load_config
from m6.runs.processes import Runtime, start
from m6.training.meta_model import build_meta_model
from m6.training.reduction.messages import ring_bytes
from scripts.experiments.experiment import ResultTable, code_version, train_on_ranks

FOLDER = Path(__file__).resolve().parent
CONFIG = FOLDER.parent / "prototyping" / "config.json"
RESULTS = FOLDER / "results.csv"
STEPS, WINDOW = 200, 10
# The rules for large models would send all of this small one whole.
_SMALL = {"dense_elements": 4096}
REDUCERS: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "top_k 10 %": {"gradients": "top_k", "density": 0.1, "warmup_steps": 20, **_SMALL},
    "top_k 1 %": {"gradients": "top_k", "density": 0.01, "warmup_steps": 20, **_SMALL},
    "chunks 50 %": {"gradients": "chunks", "density": 0.5, "chunk_elements": 64, "warmup_steps": 20, **_SMALL},
    "powersgd rank 4": {"gradients": "powersgd", "rank": 4, "warmup_steps": 20, **_SMALL},
}
SETTINGS = (
    "train_micro_batch_size_per_gpu=4",
    "zero_optimization.stage=1",
    "m6.moe=null",
    "m6.model.ffn_hidden_size=256",
    f"m6.training.total_steps={STEPS}",
    f"m6.evaluation.interval_steps={STEPS}",
    f"m6.checkpoint.interval_steps={STEPS}",
    "m6.logging.interval_steps=1",
)


def main(seeds: int) -> None:
    """Trains what is missing in results.csv; all reducers of one seed come before the next seed."""
    table, runtime = ResultTable(RESULTS, ("reducer", "seed")), start()
    for seed, reducer in product(range(seeds), REDUCERS):
        if not table.holds({"reducer": reducer, "seed": seed}):
            train_and_record(table, reducer, REDUCERS[reducer], seed, runtime)


def train_and_record(
    table: ResultTable, reducer: str, communication: dict[str, Any], seed: int, runtime: Runtime
) -> None:
    """Trains one run; the main rank adds its row to the table.

    Args:
        reducer: its name in the table.
        communication: the run's ``m6.communication``.
    """
    config = load_config(
        CONFIG, (*SETTINGS, f"m6.communication={json.dumps(communication)}", f"m6.training.seed={seed}")
    )
    code = code_version()
    if not (lines := train_on_ranks(config, runtime)):
        return
    numel = sum(parameter.numel() for parameter in build_meta_model(config, None).parameters())
    whole = ring_bytes(numel * 4, runtime.world_size)
    steps = [line for line in lines if "loss" in line]
    sent = [line.get("gradient_bytes", {"sent": whole})["sent"] for line in steps]
    losses = [line["loss"] for line in steps]
    validation = next(line["validation"] for line in lines if "validation" in line)
    row = {"reducer": reducer, "seed": seed, "code": code, "parameters": numel}
    row |= {"training": statistics.mean(losses[-5 * WINDOW :])}
    row |= {name: validation[name] for name in sorted(validation)}
    windows = range(0, STEPS, WINDOW)
    row["curve"] = " ".join(f"{statistics.mean(losses[at : at + WINDOW]):.4f}" for at in windows)
    row["bytes"] = " ".join(f"{statistics.mean(sent[at : at + WINDOW]):.0f}" for at in windows)
    table.append(row)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    main(parser.parse_args().seeds)
