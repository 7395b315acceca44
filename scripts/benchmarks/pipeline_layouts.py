"""Checkpoints of runs with and without pipelines, each resumed under every layout: is the state the same, and the step?

PYTHONPATH=. python scripts/benchmarks/pipeline_layouts.py [CONFIG]      (default: configs/m6_smoke.json)

It needs the data of the configuration, by default that of scripts/smoke.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing

from m6.checkpoints.comparison import compare
from m6.checkpoints.format import CheckpointReader
from m6.config.run import load_config
from m6.runs.directory import RunDirectory
from m6.training.checkpointing import Checkpointer
from m6.training.loop import Trainer
from scripts.benchmarks.record import ROOT, Recorder

SAVED, LAST = 2, 3
SHORT = (
    "m6.pseudo_to_real=null",
    f"m6.training.total_steps={LAST}",
    "m6.schedule.warmup_steps=1",
    f"m6.checkpoint.interval_steps={SAVED}",
    "m6.evaluation.num_rows=2",
    "m6.logging.interval_steps=1",
    "m6.data.num_workers=0",
    "m6.model.num_layers=5",
    "m6.model.hidden_size=64",
    "m6.model.num_attention_heads=2",
    "m6.model.ffn_hidden_size=128",
    "m6.model.hidden_dropout=0.1",
    "train_batch_size=16",
    "train_micro_batch_size_per_gpu=2",
)
Layout = tuple[int, int, int, dict[str, Any] | None]
"""(ranks, ZeRO stage, ep_size, pipeline)."""
LAYOUTS: dict[str, Layout] = {
    "1 rank": (1, 0, 1, None),
    "2 ranks, ZeRO 1, ep 2": (2, 1, 2, None),
    "2 ranks, 1F1B 4 + 1, ZeRO 1": (2, 1, 1, {"num_ranks": 2, "schedule": "1f1b", "layers": [4, 1]}),
    "2 ranks, ZB-V, ZeRO 0": (2, 0, 1, {"num_ranks": 2, "schedule": "zbv"}),
    "4 ranks, 1F1B of 4, ZeRO 1": (4, 1, 1, {"num_ranks": 4, "schedule": "1f1b"}),
    "4 ranks, ZB-V 1 + 2 + 1 + 1, ep 2, ZeRO 1": (
        4, 1, 2, {"num_ranks": 2, "schedule": "zbv", "layers": [1, 2, 1, 1]},
    ),
    "4 ranks, interleaved, ep 2, ZeRO 0": (4, 0, 2, {"num_ranks": 2, "schedule": "interleaved_1f1b"}),
}  # fmt: skip


def _train(rank: int, layout: Layout, port: int, config: Path, work: list[tuple[Path, int | None]]) -> None:
    """Goes on with runs in their folders; the new checkpoint of the state that was read goes to ``FOLDER/again``."""
    ranks, zero, ep_size, pipeline = layout
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    from m6.runs.processes import start

    runtime = start()
    overrides = (f"zero_optimization.stage={zero}", f"m6.training.ep_size={ep_size}")
    settings = load_config(config, (*SHORT, *overrides, f"m6.parallel.pipeline={json.dumps(pipeline)}"))
    for folder, stop_after in work:
        run = RunDirectory(folder)
        if runtime.is_main:
            run.open(settings, ranks)
        dist.barrier()
        trainer = Trainer(settings, run, runtime)
        if trainer.checkpoint is not None:
            state = trainer.checkpoint.state
            trainer._resume()
            Checkpointer(folder / "again", runtime, 1, async_save=False).save(trainer.engine, SAVED, state)
            trainer = Trainer(settings, run, runtime)
        trainer.train(stop_after)
    dist.barrier()
    dist.destroy_process_group()


def _start(layout: Layout, config: Path, work: list[tuple[Path, int | None]], number: int) -> None:
    port = 28000 + (os.getpid() + number) % 1000
    torch.multiprocessing.start_processes(_train, (layout, port, config, work), nprocs=layout[0], start_method="spawn")


def _last(folder: Path) -> tuple[float, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return next((line["loss"], line["grad_norm"]) for line in lines if line["step"] == LAST and "loss" in line)


def _checkpoint(folder: Path) -> CheckpointReader:
    return CheckpointReader(folder / f"step_{SAVED:08d}")


def main() -> None:
    """Trains, resumes and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "m6_smoke.json")
    config = parser.parse_args().config
    recorder = Recorder("pipeline_layouts", "Checkpoints resumed under other layouts")
    table, pairs = [], []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        _start(LAYOUTS["1 rank"], config, [(root / "straight", None)], 0)
        expected = _last(root / "straight")
        for number, layout in enumerate(LAYOUTS.values()):
            _start(layout, config, [(root / f"from {number}", SAVED)], 1 + number)
        for number, layout in enumerate(LAYOUTS.values()):
            folders = [root / f"{first} to {number}" for first in range(len(LAYOUTS))]
            for first, folder in enumerate(folders):
                shutil.copytree(root / f"from {first}", folder)
            _start(layout, config, [(folder, None) for folder in folders], 50 + number)
        for first, name in enumerate(LAYOUTS):
            errors = []
            for second, other in enumerate(LAYOUTS):
                folder = root / f"{first} to {second}"
                found = compare(_checkpoint(folder / "checkpoints"), _checkpoint(folder / "again"))
                loss, norm = _last(folder)
                error = max(abs(loss / expected[0] - 1), abs(norm / expected[1] - 1))
                equal = found.digests[0] == found.digests[1]
                pairs.append({"from": name, "to": other, "equal": equal, "loss": loss, "norm": norm, "error": error})
                errors.append(f"{'' if equal else 'other state, '}{error:.0e}")
            table.append([name, *errors])
    notes = (
        f"{len(pairs)} pairs: row, the layout that trained {SAVED} steps of `{config.name}` with five layers of width "
        f"64 and dropout, and saved; column, in the same order, the layout that resumed and trained step {LAST}. A "
        "checkpoint that the second layout writes before it trains has the same weights and moments to the bit, "
        "unless the cell says otherwise. The number is the larger of the relative errors of loss and gradient norm "
        "of the step after, against one rank that trained all steps; fp32."
    )
    recorder.write(["from", *map(str, range(1, len(LAYOUTS) + 1))], table, notes, {"pairs": pairs})


if __name__ == "__main__":
    main()
