"""The step of configs/m6_smoke.json with two checkouts of this repository, run by run in turn.

    PYTHONPATH=. python scripts/benchmarks/smoke_steps.py BEFORE --data data/smoke

BEFORE is a checkout, compared with this one. Both train with BEFORE's JSON and with the data folder that ``bash
scripts/smoke.sh`` builds. A run's step is the median of its intervals of ten steps, without the first three.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from golden_runs import pretrain
from record import ROOT, Recorder, spread

from m6.validation import read_document

SKIPPED = 3


def step_s(tree: Path, config: Path, data: Path, steps: int) -> float:
    """Seconds of a step of a run with the code of ``tree``."""
    settings = {
        "m6.data.path": data, "m6.data.tokenizer": data / "tokenizer", "m6.training.total_steps": steps,
        "m6.schedule.warmup_steps": 10, "m6.pseudo_to_real": "null", "m6.logging.interval_steps": 10,
        "m6.checkpoint.interval_steps": 10 * steps,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        pretrain(tree, config, Path(folder, "run"), settings)
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [entry["step_time_s"] for entry in map(json.loads, lines) if "step_time_s" in entry]
    return statistics.median(times[SKIPPED:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    # Its keys have had other names.
    document = read_document(options.before / "configs" / "m6_smoke.json")
    del document["m6"]["evaluation"]
    recorder = Recorder("smoke_steps", "The step of m6_smoke before and after")
    trees = {"before": options.before.resolve(), "after": ROOT}
    found: dict[str, list[float]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "m6_smoke.json")
        config.write_text(json.dumps(document), encoding="utf-8")
        for pair in range(options.pairs):
            for name in sorted(trees, reverse=bool(pair % 2)):  # neither is always the first
                found[name].append(step_s(trees[name], config, options.data.resolve(), options.steps))
    ratios = [float(ratio) for ratio in np.divide(found["after"], found["before"])]
    rows = [[name, spread([1000 * each for each in times], ".0f")] for name, times in found.items()]
    rows.append(["after / before, pair by pair", spread(ratios)])
    commit = ["git", "-C", str(trees["before"]), "rev-parse", "--short", "HEAD"]
    sha = subprocess.run(commit, capture_output=True, text=True).stdout.strip()
    notes = f"Before is commit {sha}. {options.pairs} runs of {options.steps} steps each; medians, and 10 to 90 %."
    recorder.write(["run", "ms of a step"], rows, notes, {"before_commit": sha, "seconds": found, "ratios": ratios})


if __name__ == "__main__":
    main()
