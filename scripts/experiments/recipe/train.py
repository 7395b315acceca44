"""Trains candidates for the recipe and appends each finished run to results.csv; a finished run is not repeated.

python scripts/experiments/recipe/train.py [--seeds 3] [CANDIDATE ...]      (default: all of candidates.json)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from experiment import ResultTable  # noqa: E402

from m6.config.run import load_config  # noqa: E402
from m6.data.collate import MicroBatch  # noqa: E402
from m6.runs.directory import RunDirectory  # noqa: E402
from m6.runs.processes import Runtime, start  # noqa: E402
from m6.training.loop import Trainer  # noqa: E402
from m6.training.reporting.outcome import StepOutcome  # noqa: E402

RESULTS = HERE / "results.csv"
KEY = ("candidate", "seed")


class TimedTrainer(Trainer):
    """Notes the CPU seconds of each step in ``step_cpu_s``."""

    step_cpu_s: list[float]

    def run_step(self, micro_batches: list[MicroBatch]) -> StepOutcome:
        begin = time.process_time()
        outcome = super().run_step(micro_batches)
        self.step_cpu_s.append(time.process_time() - begin)
        return outcome


def candidates() -> dict[str, list[str]]:
    """The overrides of small.json by the name of the candidate."""
    document: dict[str, list[str]] = json.loads((HERE / "candidates.json").read_text(encoding="utf-8"))
    return document


def row_of(name: str, seed: int, runtime: Runtime) -> dict[str, Any]:
    """Trains a candidate in a folder that is then removed, and returns its line of the table."""
    overrides = (*candidates()[name], f"m6.training.seed={seed}")
    with tempfile.TemporaryDirectory(prefix="recipe_") as folder:
        run = RunDirectory(Path(folder) / "run")
        config = load_config(HERE / "small.json", overrides)
        run.open(config, runtime.world_size)
        trainer = TimedTrainer(config, run, runtime)
        trainer.step_cpu_s = []
        if not trainer.train():
            raise SystemExit(f"stopped by a signal in {name}, seed {seed}")
        entries = run.read_metrics()
    losses: dict[str, float] = next(entry["validation"] for entry in reversed(entries) if "validation" in entry)
    # A short form of the curve: the mean loss of the objectives at each validation.
    curve = {
        entry["step"]: statistics.fmean(entry["validation"].values()) for entry in entries if "validation" in entry
    }
    return {
        "candidate": name,
        "seed": seed,
        "steps": trainer.step,
        "tokens_seen": trainer.tokens_seen,
        "step_cpu_s": f"{statistics.median(trainer.step_cpu_s):.3f}",
        "mean_loss": f"{statistics.fmean(losses.values()):.4f}",
        **{objective: f"{loss:.4f}" for objective, loss in losses.items()},
        "curve": " ".join(f"{step}:{loss:.3f}" for step, loss in curve.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CANDIDATE")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - candidates().keys()
    if unknown:
        parser.error(f"unknown candidates {', '.join(sorted(unknown))}; candidates.json has {', '.join(candidates())}")
    table, runtime = ResultTable(RESULTS, KEY), start()
    for seed in range(arguments.seeds):
        for name in arguments.names or candidates():
            if not table.holds({"candidate": name, "seed": seed}):
                row = row_of(name, seed, runtime)
                table.append(row)
                print(f"{name}, seed {seed}: {row['mean_loss']} nats, {row['step_cpu_s']} CPU s a step", flush=True)


if __name__ == "__main__":
    main()
