"""Trains the runs of the comparison one after another and appends each to results.csv; a finished run is not repeated.

python scripts/experiments/pseudo_to_real/train.py [NAME ...]      (default: all runs)
"""

from __future__ import annotations

import copy
import csv
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from m6.config.run import parse_config
from m6.data.collate import MicroBatch
from m6.files import atomic_path
from m6.runs.directory import RunDirectory
from m6.runs.processes import start
from m6.training.loop import Trainer
from m6.training.reporting.sums import StepOutcome

HERE = Path(__file__).parent
RESULTS = HERE / "results.csv"
COLUMNS = (
    "run", "seed", "step", "stage", "switch_step", "tokens_seen", "validation_loss", "text_denoising",
    "language_modelling", "image_captioning", "image_text_denoising", "pseudo_step_cpu_s", "real_step_cpu_s",
    "pseudo_state_bytes", "real_state_bytes", "gradient_correlation", "layer_divergence",
)  # fmt: skip
STEPS = 300
HALF: dict[str, Any] = {"switch_step": STEPS // 2, "correlation_interval_steps": 15}
# "real" is Real from scratch.
RUNS: dict[str, dict[str, Any] | None] = {
    "real": None,
    "switch 50 %": HALF,
    "switch 10 %": {**HALF, "switch_step": STEPS // 10},
    "switch 25 %": {**HALF, "switch_step": STEPS // 4},
    "switch 75 %": {**HALF, "switch_step": 3 * STEPS // 4},
    "plateau": {**HALF, "switch": "loss_plateau", "switch_step": 3 * STEPS // 4, "plateau_window_steps": 30},
    "correlation": {**HALF, "switch": "gradient_correlation", "switch_step": 3 * STEPS // 4},
    "50 %, reset": {**HALF, "optimizer_state": "reset"},
    "50 %, sum": {**HALF, "gradient": "sum"},
    "50 %, sum, reset": {**HALF, "gradient": "sum", "optimizer_state": "reset"},
    "50 %, rewarm": {**HALF, "learning_rate": "rewarm", "rewarm_steps": 30},
}
# Where Pseudo steps are cheap there can be more of them: as many Real steps as in "switch 50 %", after three times as
# many Pseudo steps.
RUNS["long Pseudo"] = {**HALF, "switch_step": 3 * STEPS // 2}
TOTAL_STEPS = {"long Pseudo": 2 * STEPS}
# The same with the optimizer, positions and schedule of scripts/experiments/recipe.
RECIPE = "recipe: "
LR = 0.0048  # of Muon: 0.0042 sqrt(128 / width), see there; half of it ended higher
_AGAIN = ("real", "switch 10 %", "switch 25 %", "switch 50 %", "switch 75 %", "long Pseudo")
RUNS |= {RECIPE + name: RUNS[name] for name in _AGAIN}
# Real from scratch and these are trained with three seeds.
SEEDS = {name: (0, 1, 2) for name in RUNS if name.endswith(("real", "switch 50 %", "long Pseudo"))}
SEEDS[RECIPE + "switch 75 %"] = (0, 1, 2)  # m6_10t switches there
# Never switching, for what "switch 75 %" costs if a Real step costs 4.4 Pseudo steps: a stage has to end before the
# run does, so the last step is a Real one.
RUNS[RECIPE + "Pseudo alone"], TOTAL_STEPS["Pseudo alone"] = {**HALF, "switch_step": 550}, 551
SEEDS[RECIPE + "Pseudo alone"] = (0, 1, 2)
# Real from scratch for what "switch 75 %" costs if a Real step costs 4.4 Pseudo steps, with a schedule of that length.
RUNS[RECIPE + "short Real"], TOTAL_STEPS["short Real"], SEEDS[RECIPE + "short Real"] = None, 126, (0, 1, 2)


class TimedTrainer(Trainer):
    """Notes the CPU seconds of the steps of each stage in ``step_cpu_s``."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.step_cpu_s: dict[str, list[float]] = {}

    def run_step(self, micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        begin = time.process_time()
        outcomes = super().run_step(micro_batches)
        self.step_cpu_s.setdefault(self.stage.name, []).append(time.process_time() - begin)
        return outcomes


def document_of(name: str, seed: int) -> dict[str, Any]:
    document: dict[str, Any] = copy.deepcopy(json.loads((HERE / "config.json").read_text(encoding="utf-8")))
    steps = TOTAL_STEPS.get(name.removeprefix(RECIPE), STEPS)
    document["m6"]["training"] = {"total_steps": steps, "seed": seed}
    if name.startswith(RECIPE):
        document["optimizer"]["type"] = "Muon"
        document["optimizer"]["params"] |= {"lr": LR, "adamw_lr": 4 * LR, "momentum": 0.9}
        document["m6"]["model"]["rotary_base"] = 10000
        document["m6"]["schedule"] |= {"decay": "wsd", "decay_share": 0.3, "final_lr_ratio": 0.05}
    if RUNS[name] is not None:
        document["m6"]["pseudo_to_real"] = RUNS[name]
    return document


def rows_of(name: str, seed: int) -> list[dict[str, Any]]:
    """Trains one run in a folder that is then removed, and returns its lines of the table: one per validation."""
    config, runtime = parse_config(document_of(name, seed)), start()
    folder = Path(tempfile.mkdtemp(prefix="pseudo_to_real_")) / "run"
    run = RunDirectory(folder)
    run.open(config, runtime.world_size)
    trainer = TimedTrainer(config, run, runtime)
    trainer.train()
    rows: list[dict[str, Any]] = []
    latest: dict[str, Any] = {}
    state_bytes: dict[str, int] = {}
    for entry in run.read_metrics():
        if "loss" in entry:
            latest = {**latest, "tokens_seen": entry["tokens_seen"], **entry.get("stage", {"name": "real"})}
            state_bytes[latest["name"]] = latest.get("state_bytes", 0)
        else:
            losses = entry["validation"]
            rows.append(
                {
                    "run": name,
                    "seed": seed,
                    "step": entry["step"],
                    "stage": latest["name"],
                    "switch_step": latest.get("switch_step"),
                    "tokens_seen": latest["tokens_seen"],
                    "validation_loss": statistics.fmean(losses.values()),
                    **losses,
                    **{key: _mean(latest.get(key)) for key in ("gradient_correlation", "layer_divergence")},
                }
            )
    for row in rows:
        for stage in ("pseudo", "real"):
            seconds = trainer.step_cpu_s.get(stage)
            row[f"{stage}_step_cpu_s"] = statistics.median(seconds) if seconds else None
            row[f"{stage}_state_bytes"] = state_bytes.get(stage)
    shutil.rmtree(folder.parent)
    return rows


def _mean(values: list[float] | None) -> float | None:
    return statistics.fmean(values) if values else None


def done() -> set[tuple[str, int]]:
    if not RESULTS.exists():
        return set()
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {(row["run"], int(row["seed"])) for row in csv.DictReader(file)}


def append(rows: list[dict[str, Any]]) -> None:
    """Adds a run's lines, all or none."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if RESULTS.exists():
        text.write(RESULTS.read_text(encoding="utf-8"))
    else:
        writer.writeheader()
    writer.writerows(
        {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
    )
    with atomic_path(RESULTS) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def main() -> None:
    for name in sys.argv[1:] or RUNS:
        for seed in SEEDS.get(name, (0,)):
            if (name, seed) not in done():
                append(rows_of(name, seed))
                print(f"{name}, seed {seed}: done", flush=True)


if __name__ == "__main__":
    main()
