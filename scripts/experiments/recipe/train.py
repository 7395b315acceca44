"""Trains candidates for the recipe and appends each finished run to a table; a finished run is not repeated.

python scripts/experiments/recipe/train.py [--seeds 3] [CANDIDATE ...]      (default: all of candidates.json)

The table is results.csv for runs on a CPU, and results_gpu.csv for those on a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
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
from m6.training.reporting.sums import StepOutcome  # noqa: E402

RESULTS = {"cpu": HERE / "results.csv", "cuda": HERE / "results_gpu.csv"}
KEY = ("candidate", "seed")


class TimedTrainer(Trainer):
    """Notes the CPU seconds of each step in ``step_cpu_s``."""

    step_cpu_s: list[float]

    def run_step(self, micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        begin = time.process_time()
        outcomes = super().run_step(micro_batches)
        self.step_cpu_s.append(time.process_time() - begin)
        return outcomes


def candidates() -> dict[str, list[str]]:
    """The overrides of small.json by the name of the candidate: a base, or "base, change"."""
    found: dict[str, list[str]] = {}
    for base, group in json.loads((HERE / "candidates.json").read_text(encoding="utf-8")).items():
        found[base] = group["settings"]
        found |= {f"{base}, {name}": group["settings"] + change for name, change in group["changes"].items()}
    return found


def trained(overrides: Sequence[str], seed: int, folder: Path, runtime: Runtime) -> dict[str, Any]:
    """Trains small.json with these overrides in ``folder``, where an interrupted run goes on; returns its results."""
    run = RunDirectory(folder)
    config = load_config(HERE / "small.json", (*overrides, f"m6.training.seed={seed}"))
    run.open(config, runtime.world_size)
    trainer = TimedTrainer(config, run, runtime)
    trainer.step_cpu_s = []
    if not trainer.train():
        raise SystemExit(f"stopped by a signal in {folder}")
    entries = run.read_metrics()
    losses: dict[str, float] = next(entry["validation"] for entry in reversed(entries) if "validation" in entry)
    # A short form of the curve: the mean loss of the objectives at each validation.
    curve = {
        entry["step"]: statistics.fmean(entry["validation"].values()) for entry in entries if "validation" in entry
    }
    return {
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
    runtime = start()
    table = ResultTable(RESULTS[runtime.device.type], KEY)
    for seed in range(arguments.seeds):
        for name in arguments.names or candidates():
            if not table.holds({"candidate": name, "seed": seed}):
                with tempfile.TemporaryDirectory(prefix="recipe_") as folder:
                    result = trained(candidates()[name], seed, Path(folder) / "run", runtime)
                table.append({"candidate": name, "seed": seed, **result})
                print(
                    f"{name}, seed {seed}: {result['mean_loss']} nats, {result['step_cpu_s']} CPU s a step", flush=True
                )


if __name__ == "__main__":
    main()
