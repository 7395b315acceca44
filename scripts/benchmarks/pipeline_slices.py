"""Bytes that ranks of a pipeline keep for backward passes, and how long they wait, with rows whole and in slices.

PYTHONPATH=. python scripts/benchmarks/pipeline_slices.py

Two and four processes train one step with each number of slices. Every storage that autograd saves is counted once,
from the forward pass that saves it to the backward pass that releases it. The waits are those of the recorded passes on
a virtual clock, and of the same order for larger pipelines.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from m6.config.run import RunConfig, load_config
from m6.planning.cost.schedules import StageSeconds, run_clock
from m6.training.engine.sliced_pipeline import slice_tokens
from m6.training.pass_orders import Pass, sliced_orders
from scripts.benchmarks.pipeline_bubbles import causal_batch, part_of_loss, recording
from scripts.benchmarks.record import ROOT, Recorder

WORLDS = (2, 4)
SLICES = (1, 2, 4)
MICRO_BATCHES = 8
TOLERANCE = 0.05
"""Of the formula, for what does not grow with the tokens of a slice."""


class HeldBytes(saved_tensors_hooks):
    """A context that counts the bytes of the storages that autograd keeps.

    Args:
        parameters: storages that do not count.

    Attributes:
        peak: the most bytes at any time.
    """

    def __init__(self, *parameters: Tensor) -> None:
        super().__init__(lambda tensor: _Saved(self, tensor.detach()), lambda saved: saved.tensor)
        self._others = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._uses: dict[int, int] = {}
        self._now = self.peak = 0

    def change(self, tensor: Tensor, by: int) -> None:
        """Counts one more (1) or one less (-1) use of a tensor's storage."""
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self._others:
            return
        uses = self._uses.get(place, 0)
        self._uses[place] = uses + by
        if uses == 0 or uses + by == 0:
            self._now += by * storage.nbytes()
            self.peak = max(self.peak, self._now)


class _Saved:
    def __init__(self, held: HeldBytes, tensor: Tensor) -> None:
        self.held, self.tensor = held, tensor
        held.change(tensor, 1)

    def __del__(self) -> None:
        self.held.change(self.tensor, -1)


def held_by_formula(ranks: int, rank: int, micro_batches: int, slices: int) -> float:
    """Micro-batches of which a rank keeps activations: (P - s + n - 1) / n (Seq1F1B, arXiv 2406.03488)."""
    return min(ranks - rank + slices - 1, micro_batches * slices) / slices


def waits(orders: tuple[tuple[Pass, ...], ...], slices: int) -> float:
    """The share of a step in which ranks wait; a backward pass takes twice as long as a forward pass."""
    stage = StageSeconds(1 / slices, 1 / slices, 1 / slices)
    busy = sum(stage.of(each.kind) for order in orders for each in order) / len(orders)
    return 1 - busy / run_clock(orders, [stage] * len(orders))


def _config(ranks: int, slices: int, micro_batches: int) -> RunConfig:
    return load_config(
        ROOT / "configs" / "m6_smoke.json",
        (
            "m6.pseudo_to_real=null",
            "m6.model.num_layers=8",
            f"m6.parallel.pipeline.num_ranks={ranks}",
            f"m6.parallel.pipeline.slices={max(slices, 2)}",
            "zero_optimization.stage=1",
            "train_micro_batch_size_per_gpu=1",
            f"train_batch_size={micro_batches}",
        ),
    )


def _measure(rank: int, ranks: int, port: int, results: Any) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    from m6.runs.processes import start
    from m6.training.engine.build import build_engine
    from m6.training.engine.sliced_pipeline import SliceChoice

    runtime, chosen = start(), SliceChoice.cuts
    for micro_batches, slices in ((1, 1), *((MICRO_BATCHES, slices) for slices in SLICES)):
        config = _config(ranks, slices, micro_batches)
        # The same engine also runs whole rows.
        SliceChoice.cuts = chosen if slices > 1 else lambda self, batch: []  # type: ignore[method-assign]
        engine: Any = build_engine(config, runtime)
        engine.begin_step(0.0)
        table: tuple[nn.Parameter, ...] = () if engine.runner._table is None else (engine.runner._table,)
        held = HeldBytes(*engine.module.parameters(), *table)
        with recording() as passes, held:
            engine.accumulate([causal_batch(config)] * micro_batches, part_of_loss, range(micro_batches))
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, (passes, held.peak))
        if rank == 0:
            results.put((ranks, micro_batches, slices, found))
    if rank == 0:
        results.put(None)
    dist.barrier()
    dist.destroy_process_group()


def _clock_table() -> tuple[str, list[dict[str, float]]]:
    """Steps of 8 stages in units without waits, for rows of which a launch takes 0, 5 or 20 %."""
    lines, numbers = [], []
    for micro_batches in (1, 8, 32):
        cells = []
        for slices in (*SLICES, 0):
            steps = []
            for launch in (0.0, 0.05, 0.2):

                def seconds(size: int, before: int, launch: float = launch) -> float:
                    return launch + (1 - launch) * size / 512

                if slices:
                    each = seconds(512 // slices, 0)
                    orders = sliced_orders(8, (slices,) * micro_batches)
                    step = run_clock(orders, [StageSeconds(each / 3, each / 3, each / 3)] * 8)
                else:
                    _, step = slice_tokens(512, range(32, 512, 32), 8, micro_batches, seconds)
                steps.append(step / micro_batches)
                numbers.append(
                    {"micro_batches": micro_batches, "slices": slices, "launch": launch, "step": step / micro_batches}
                )
            cells.append(" / ".join(f"{step:.2f}" for step in steps))
        lines.append(f"| {micro_batches} | {' | '.join(cells)} |")
    head = "| M | whole rows | 2 slices | 4 slices | the programme's |\n| --- | --- | --- | --- | --- |\n"
    return head + "\n".join(lines), numbers


def main() -> None:
    """Measures and compares."""
    recorder = Recorder("pipeline_slices", "Slices of rows in a pipeline: what ranks keep, and how long they wait")
    context = torch.multiprocessing.get_context("spawn")
    rows, numbers, wrong = [], [], []
    for index, ranks in enumerate(WORLDS):
        results = context.SimpleQueue()
        arguments = (ranks, 29000 + (os.getpid() + index) % 1000, results)
        processes = torch.multiprocessing.start_processes(
            _measure, arguments, nprocs=ranks, join=False, start_method="spawn"
        )
        whole: list[int] = []
        while (found := results.get()) is not None:
            _, micro_batches, slices, of_ranks = found
            peaks = [peak for _, peak in of_ranks]
            if micro_batches == 1:
                whole = peaks
                continue
            wait = waits(tuple(tuple(passes) for passes, _ in of_ranks), slices)
            expected_wait = (ranks - 1) / (micro_batches * slices + ranks - 1)
            for rank, peak in enumerate(peaks):
                measured, expected = peak / whole[rank], held_by_formula(ranks, rank, micro_batches, slices)
                rows.append(
                    [str(ranks), str(rank), str(slices), f"{peak / 2**20:.2f} MiB", f"{measured:.2f}",
                     f"{expected:.2f}", f"{wait:.2%}", f"{expected_wait:.2%}"]
                )  # fmt: skip
                numbers.append(
                    {"ranks": ranks, "rank": rank, "slices": slices, "bytes": peak, "micro_batches_held": measured,
                     "formula": expected, "waits": wait, "waits_formula": expected_wait}
                )  # fmt: skip
                if abs(measured - expected) > TOLERANCE * expected or abs(wait - expected_wait) > 1e-9:
                    wrong.append(rows[-1])
        processes.join()
    table, steps = _clock_table()
    notes = (
        f"One step of `m6_smoke.json` with 8 layers and {MICRO_BATCHES} micro-batches of one row of 256 tokens, all of "
        "them targets, on gloo ranks. The bytes are those of all storages that autograd saves, each counted once, "
        "weights left out; a micro-batch is what the rank keeps of one whole row. With P ranks and n slices rank s "
        "keeps (P - s + n - 1) / n micro-batches, and waits (P - 1) / (M n + P - 1) of a step. What comes on top: keys "
        "and values are kept for the whole row from its first slice on.\n\n"
        "Steps of 8 stages on the clock, in units of a step without waits, where launching a pass costs 0 / 5 / 20 % "
        f"of a row's time; the last column is that of `slice_tokens` with places every 32 of 512 tokens:\n\n{table}\n\n"
        "Without launches more slices are always better; with them, the best number falls with the micro-batches."
    )
    header = ["ranks", "rank", "slices", "peak", "in micro-batches", "formula", "waits, recorded", "formula"]
    recorder.write(header, rows, notes, {"runs": numbers, "clock": steps})
    if wrong:
        sys.exit(f"more than {TOLERANCE:.0%} off: {wrong}")


if __name__ == "__main__":
    main()
