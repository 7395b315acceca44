"""Trains a small M6 with experts with and without ``m6.gradient_delay``, by each optimizer.

From the root of the repository, with the data of README.md:

    OMP_NUM_THREADS=1 python -m scripts.experiments.gradient_delay.train --seeds 3

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
from m6.runs.processes import start
from scripts.experiments.experiment import ResultTable, code_version, train_on_ranks

FOLDER = Path(__file__).resolve().parent
CONFIG = FOLDER.parent / "prototyping" / "config.json"
RESULTS = FOLDER / "results.csv"
STEPS, WINDOW = 300, 10
_COMMON = {"weight_decay": 0.01}
_BETAS = {"betas": [0.9, 0.98]}
# The second rate of each is half of the first: a smaller rate forgives more staleness.
OPTIMIZERS: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
    "AdamW": (_BETAS, (0.004, 0.002)),
    "Adafactor": ({}, (0.02, 0.01)),
    "Muon": ({**_BETAS, "momentum": 0.95}, (0.008, 0.004)),
}
SETTINGS = (
    "train_batch_size=8",
    "train_micro_batch_size_per_gpu=8",
    "m6.model.num_layers=2",
    f"m6.training.total_steps={STEPS}",
    "m6.schedule.warmup_steps=30",
    f"m6.evaluation.interval_steps={STEPS}",
    f"m6.checkpoint.interval_steps={STEPS}",
    "m6.logging.interval_steps=1",
)


def optimizer(name: str, rate: float) -> dict[str, Any]:
    """The section ``optimizer`` of a run."""
    return {"type": name, "params": {"lr": rate, **_COMMON, **OPTIMIZERS[name][0]}}


def main(seeds: int) -> None:
    """Trains what is missing in results.csv; all runs of the first rates come before those of the second ones."""
    table, runtime, code = ResultTable(RESULTS, ("optimizer", "rate", "delay", "seed")), start(), code_version()
    for index, seed, name, delay in product(range(2), range(seeds), OPTIMIZERS, (0, 1)):
        rate = OPTIMIZERS[name][1][index]
        run = {"optimizer": name, "rate": rate, "delay": delay, "seed": seed}
        if table.holds(run):
            continue
        section = {"accept_loss": True} if name == "AdamW" else {}
        overrides = (
            f"optimizer={json.dumps(optimizer(name, rate))}",
            f"m6.gradient_delay={json.dumps(section if delay else None)}",
            f"m6.training.seed={seed}",
        )
        lines = train_on_ranks(load_config(CONFIG, (*SETTINGS, *overrides)), runtime)
        losses = [line["loss"] for line in lines if "loss" in line]
        validation = next(line["validation"] for line in lines if "validation" in line)
        row = {**run, "code": code, "training": statistics.mean(losses[-5 * WINDOW :])}
        row |= {name: validation[name] for name in sorted(validation)}
        windows = range(0, STEPS, WINDOW)
        table.append(row | {"curve": " ".join(f"{statistics.mean(losses[at : at + WINDOW]):.4f}" for at in windows)})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    main(parser.parse_args().seeds)
