"""Averages the weights of a run's last checkpoints, with the decay of the learning rate and without it.

python scripts/experiments/recipe/average.py      (two runs of 400 steps; appends to average.csv, prints the table)
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from experiment import ResultTable  # noqa: E402
from train import candidates  # noqa: E402

from m6.checkpoints.discovery import complete_checkpoints  # noqa: E402
from m6.checkpoints.format import CheckpointReader  # noqa: E402
from m6.config.run import load_config  # noqa: E402
from m6.formatting import markdown_table  # noqa: E402
from m6.runs.directory import RunDirectory  # noqa: E402
from m6.runs.processes import Runtime, start  # noqa: E402
from m6.training.checkpointing import restore_weights  # noqa: E402
from m6.training.evaluation import evaluate  # noqa: E402
from m6.training.loop import Trainer  # noqa: E402

TABLE = HERE / "average.csv"
BASE = "recipe again, lr 0.004"
SCHEDULES = {"wsd": (), "no decay": ("m6.schedule.final_lr_ratio=1.0",)}
INTERVAL = 20
NUMBERS = (1, 2, 5, 10)
"""How many of the last checkpoints are averaged, which lie ``INTERVAL`` steps apart; 1 is the last one alone."""


class MeanWeights:
    """The mean of the weights of several checkpoints of one run, as a reader of weights."""

    def __init__(self, folders: list[Path]) -> None:
        self.readers = [CheckpointReader(folder) for folder in folders]
        self.folder, self.shapes = folders[-1], self.readers[-1].shapes

    def names(self, kind: str) -> list[str]:
        return self.readers[-1].names(kind)

    def read_into(self, name: str, kind: str, offset: int, target: torch.Tensor) -> None:
        total = torch.zeros(target.shape, dtype=torch.float64)
        for reader in self.readers:
            part = torch.empty(target.shape)
            reader.read_into(name, kind, offset, part)
            total += part
        target.copy_(total / len(self.readers))


def run(schedule: str, folder: Path, runtime: Runtime) -> None:
    """Trains with a schedule and adds a row for each number of averaged checkpoints."""
    saving = (f"m6.checkpoint.interval_steps={INTERVAL}", f"m6.checkpoint.keep_last={max(NUMBERS)}")
    config = load_config(HERE / "small.json", (*candidates()[BASE], *SCHEDULES[schedule], *saving))
    directory = RunDirectory(folder)
    directory.open(config, runtime.world_size)
    trainer = Trainer(config, directory, runtime)
    if not trainer.train():
        raise SystemExit(f"stopped by a signal in {folder}")
    checkpoints = complete_checkpoints(directory.checkpoints)
    for number in NUMBERS:
        mean = MeanWeights(checkpoints[-number:])
        restore_weights(trainer.engine, mean)
        num_rows = config.m6.evaluation.num_rows
        losses = evaluate(trainer.engine, trainer.data, num_rows, trainer.dims, runtime)["validation"]
        rounded = {objective: f"{loss:.4f}" for objective, loss in losses.items()}
        mean_loss = f"{statistics.fmean(losses.values()):.4f}"
        ResultTable(TABLE, ()).append({"schedule": schedule, "averaged": number, "mean_loss": mean_loss, **rounded})


def main() -> None:
    runtime = start()
    for schedule in SCHEDULES:
        if not ResultTable(TABLE, ("schedule",)).holds({"schedule": schedule}):
            with tempfile.TemporaryDirectory(prefix="average_") as folder:
                run(schedule, Path(folder) / "run", runtime)
    rows = ResultTable(TABLE, ()).rows()
    print(markdown_table(list(rows[0]), [list(row.values()) for row in rows]))


if __name__ == "__main__":
    main()
