"""Trains a small dense M6 with growing batches until its loss has fallen to a target.

From the root of the repository, with the data of README.md:

    OMP_NUM_THREADS=1 python -m scripts.experiments.batch_ladder.train --optimizer AdamW --seeds 3

Adds a row to results_OPTIMIZER.csv per finished run and leaves out the runs that have one.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from itertools import product
from pathlib import Path

from m6.config.run import load_config
from m6.data.collate import MicroBatch
from m6.runs.directory import RunDirectory, noise_scale
from m6.runs.processes import Runtime, start
from m6.training.loop import Trainer
from m6.training.reporting.sums import StepOutcome
from scripts.experiments.experiment import ResultTable, code_version

FOLDER = Path(__file__).resolve().parent
CONFIG = FOLDER.parent / "prototyping" / "config.json"
BATCHES = {"AdamW": (8, 16, 32, 64, 128), "Lamb": (8, 32, 128)}
TARGET, WINDOW_SAMPLES = 3.0, 256
MAX_STEPS = 400
# At a batch of 16; it grows with the square root of the batch.
RATES = {"AdamW": 0.004, "Lamb": 0.015}
SETTINGS = (
    "train_micro_batch_size_per_gpu=8",
    "m6.moe=null",
    "m6.model.ffn_hidden_size=256",
    f"m6.training.total_steps={MAX_STEPS}",
    "m6.model.num_layers=2",
    "m6.data.sequence_length=64",
    "m6.schedule.warmup_steps=10",
    "m6.schedule.final_lr_ratio=1.0",  # after the warm-up the rate is constant
    f"m6.evaluation.interval_steps={MAX_STEPS}",
    f"m6.checkpoint.interval_steps={MAX_STEPS}",
    "m6.logging.interval_steps=1",
)


class _UntilTarget(Trainer):
    """Stops when the mean loss of the last steps is at most the target."""

    losses: list[float]
    reached: int | None = None

    def run_step(self, micro_batches: list[MicroBatch]) -> list[StepOutcome]:
        [outcome] = super().run_step(micro_batches)
        self.losses.append(outcome.loss)
        # Over equally many samples whatever the batch: single losses of small batches scatter more.
        window = WINDOW_SAMPLES // self.config.deepspeed.train_batch_size
        if len(self.losses) >= window and statistics.mean(self.losses[-window:]) <= TARGET and self.reached is None:
            self.reached = len(self.losses)
            self.stop_flag.raised = True  # the loop makes one step more
        return [outcome]


def main(optimizer: str, seeds: int) -> None:
    """Trains what is missing; all batches of one seed come before the next seed."""
    table = ResultTable(FOLDER / f"results_{optimizer}.csv", ("batch", "seed"))
    runtime, code = start(), code_version()
    for seed, batch in product(range(seeds), BATCHES[optimizer]):
        if not table.holds({"batch": batch, "seed": seed}):
            table.append({"batch": batch, "seed": seed, "code": code, **_trained(optimizer, batch, seed, runtime)})


def _trained(optimizer: str, batch: int, seed: int, runtime: Runtime) -> dict[str, float | int | str]:
    """Steps to the target, and the noise scale in the second half of the run; empty without several micro-batches."""
    lr = RATES[optimizer] * (batch / 16) ** 0.5
    overrides = (
        *SETTINGS,
        f"train_batch_size={batch}",
        f'optimizer={{"type": "{optimizer}", "params": {{"lr": {lr}, "betas": [0.9, 0.98], "weight_decay": 0.01}}}}',
        f"m6.training.seed={seed}",
    )
    root = Path(tempfile.mkdtemp())
    config, run = load_config(CONFIG, overrides), RunDirectory(root / "run")
    run.open(config, runtime.world_size)
    trainer = _UntilTarget(config, run, runtime)
    trainer.losses = []
    trainer.train()
    lines = [line for line in run.read_metrics() if "loss" in line]
    scale = noise_scale(lines[len(lines) // 2 :])
    shutil.rmtree(root)
    return {
        "lr": f"{lr:.4g}",
        "steps": "" if trainer.reached is None else trainer.reached,
        "noise_scale": "" if scale is None else f"{scale:.1f}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=tuple(BATCHES), default="AdamW")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    main(arguments.optimizer, arguments.seeds)
