"""Compares ``chunks``, which sends later what it leaves out, with DLCP (arXiv 2008.08445), where it is lost.

From the root of the repository, with the data of README.md:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m scripts.experiments.gradient_bytes.lost_chunks --seeds 3
    python -m scripts.experiments.gradient_bytes.lost_chunks --table

Adds a row to lost_chunks.csv per finished run and leaves out the runs that have one.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from m6.formatting import markdown_table
from m6.runs.processes import start
from m6.training.reduction import reducer
from m6.training.reduction.messages import kept_count
from m6.training.reduction.reducer import Chunks
from scripts.experiments.experiment import ResultTable
from scripts.experiments.gradient_bytes.train import FOLDER, REDUCERS, train_and_record

RESULTS = FOLDER / "lost_chunks.csv"
DENSITIES = (0.7, 0.5, 0.3)
_MEASURES = ("training", "language_modelling", "image_captioning")


class LostTogether(Chunks):
    """The chunks that all ranks leave out are lost; no sum needs another divisor."""

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """See ``Compressor``; nothing waits for the next step."""
        sums = super().__call__(waiting, density)
        for tensor in waiting:
            tensor.zero_()
        return sums


class LostChunks(Chunks):
    """DLCP: each rank leaves out its own chunks with the smallest norms, at most one minus the density of them.

    They are lost. A sum is divided by the ranks whose chunk arrived; here it is multiplied by ranks / arrived, because
    the engine divides by all ranks. Bytes are not counted: those of ``Chunks`` without its norms.
    """

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """See ``Compressor``; nothing waits for the next step."""
        chunks = torch.cat([self._cut(tensor) for tensor in waiting])
        chosen = chunks.square().sum(dim=1).topk(kept_count(len(chunks), density), sorted=False).indices
        arrived = torch.zeros(len(chunks), 1, dtype=chunks.dtype, device=chunks.device)
        arrived[chosen] = 1
        sums = chunks * arrived
        for message in (sums, arrived):
            dist.all_reduce(message)
        sums *= dist.get_world_size() / arrived.clamp(min=1)
        for tensor in waiting:
            tensor.zero_()
        return self._joined(sums, waiting)


COMPRESSORS: dict[str, type[Chunks]] = {"chunks": Chunks, "lost": LostChunks, "lost together": LostTogether}


def runs() -> dict[str, dict[str, Any]]:
    """``m6.communication`` of each run by its name."""
    found: dict[str, dict[str, Any]] = {"all_reduce": {}}
    for density, name in product(DENSITIES, COMPRESSORS):
        found[f"{name} {density:.0%}"] = REDUCERS["chunks 50 %"] | {"density": density}
    return found


def main(seeds: int) -> None:
    """Trains what is missing in lost_chunks.csv; all runs of one seed come before the next seed."""
    table, runtime = ResultTable(RESULTS, ("reducer", "seed")), start()
    for seed, (name, communication) in product(range(seeds), runs().items()):
        if not table.holds({"reducer": name, "seed": seed}):
            compressor = COMPRESSORS.get(name.rpartition(" ")[0], Chunks)
            with mock.patch.object(reducer, "Chunks", compressor):
                train_and_record(table, name, communication, seed, runtime)


def loss_table() -> str:
    """Losses: mean and standard deviation over seeds."""
    rows = ResultTable(RESULTS, ("reducer", "seed")).rows()
    lines = []
    for name in runs():
        values = [[float(row[measure]) for row in rows if row["reducer"] == name] for measure in _MEASURES]
        lines.append([name, *(f"{statistics.mean(each):.3f} ({statistics.stdev(each):.3f})" for each in values)])
    return markdown_table(["reducer", "training, last 50 steps", "text", "captions"], lines, "lrrr")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--table", action="store_true", help="print the table of the page")
    arguments = parser.parse_args()
    print(loss_table()) if arguments.table else main(arguments.seeds)
