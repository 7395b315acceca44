"""Measures what a Real step costs in Pseudo steps: in memory, and with the Real model's states on a slower tier.

    python scripts/experiments/pseudo_to_real/step_times.py [ROUNDS] [FOLDER]

The slower tier is a file below FOLDER on this machine's disk: before a step all weights and moments are read from it,
after the step they are written and synced; the pages are dropped from the cache. That is the traffic of optimizer and
parameter offloading without any overlap with the computation, so it bounds what a good implementation costs. The
three kinds of step take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train import document_of

from m6.config.run import parse_config
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.runs.signals import Requests
from m6.training.engine.build import build_engine
from m6.training.stages.stage import Stage
from m6.training.train_step import TrainStep


class Disk:
    """Tensors whose content lies in a file between ``load`` and ``store``."""

    def __init__(self, path: Path, tensors: list[Tensor]) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.buffers = [memoryview(t.detach().view(-1).view(torch.uint8).numpy().data) for t in tensors]
        self.nbytes = sum(len(buffer) for buffer in self.buffers)
        self.store()

    def load(self) -> None:
        if os.preadv(self.file, self.buffers, 0) != self.nbytes:
            raise OSError("short read")

    def store(self) -> None:
        if os.pwritev(self.file, self.buffers, 0) != self.nbytes:
            raise OSError("short write")
        os.fdatasync(self.file)
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    config, runtime = parse_config(document_of("switch 50 %", 0)), start()
    data = open_data(config)
    steps: dict[str, Any] = {}
    engine: Any = None
    for name, sharing in (("Pseudo", Stage(config, None).sharing), ("Real", None)):
        engine = build_engine(config, runtime, sharing)
        steps[name] = TrainStep(engine, config, runtime, Stage(config, None))
    disk = Disk(folder / "states", [fragment.data for fragment in engine.fragments()])
    times: dict[str, list[float]] = {"Pseudo": [], "Real": [], "Real, offloaded": []}
    for number in range(rounds):
        batch = data.micro_batch(number)
        for name in times:
            begin = time.perf_counter()
            if name == "Real, offloaded":
                disk.load()
            steps[name.split(",")[0]](number, [batch], Requests)
            if name == "Real, offloaded":
                disk.store()
            times[name].append(time.perf_counter() - begin)
    os.unlink(folder / "states")
    print(f"{disk.nbytes / 2**20:.1f} MiB of states, {rounds} rounds; seconds: median (quartiles)")
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles(seconds[2:], n=4)
        relative = statistics.median(a / b for a, b in zip(seconds[2:], times["Pseudo"][2:], strict=True))
        print(f"{name}: {middle:.3f} ({low:.3f} to {high:.3f}), {relative:.2f} Pseudo steps of the same round")


if __name__ == "__main__":
    main()
