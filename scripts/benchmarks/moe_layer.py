"""How fast the expert layer is, forward and backward, and how much it keeps; README.md says how to read it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Collection
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import typer

from m6.runs.processes import start
from moe import MoELayer
from scripts.benchmarks.moe_contestants import (
    BFLOAT16,
    FORCED,
    GRIDS,
    MOST_BYTES_BATCHED,
    Cell,
    Floor,
    ForcedStep,
    Step,
    autoep,
    chosen_products,
    deepspeed_moe,
    dense,
    k_times_top_1,
    mixtral,
    multiplies_bfloat16,
    ours,
    switch,
)
from scripts.benchmarks.moe_targets import (
    BFLOAT16_HEADER,
    DEEPSPEED,
    HEADER,
    Result,
    bfloat16_notes,
    bfloat16_row,
    peers_row,
    speed_notes,
)
from scripts.benchmarks.record import Recorder

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


class Grid(str, Enum):
    """Of sizes: moe_contestants.py."""

    SMALL = "small"
    AXES = "axes"


Rounds = Annotated[
    int, typer.Option(min=1, help="measurements of each contestant, in turn, after one that does not count")
]
Steps = dict[str, Callable[[], None]]

OWN_IN_BFLOAT16 = ("ours", "ours, loop", "ours gated")
ALL_IN_BFLOAT16 = (
    *OWN_IN_BFLOAT16,
    "ours, grouped_mm",
    "dense",
    *DEEPSPEED,
    "dense gated",
    "mixtral grouped_mm",
    "mixtral batched_mm",
)


def contestants(cell: Cell, dtype: torch.dtype, names: Collection[str] | None = None) -> Steps:
    """By name; the gated ones have three matrices and stand against a gated dense network."""
    rows, width = cell.num_tokens, cell.hidden_size
    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "dense": lambda: dense(cell),
        "ours": lambda: ours(cell),
        "ours, recompute": lambda: ours(cell, recompute_activation=True),
        "deepspeed drop": lambda: deepspeed_moe(cell, drop=True),
        "deepspeed no drop": lambda: deepspeed_moe(cell, drop=False),
    }
    if cell.top_k == 1:
        makers["switch"] = lambda: switch(cell)
    if cell.num_prototypes > 1:
        makers["ours, top-k"] = lambda: ours(Cell(rows, width, cell.num_experts, 1, cell.choices))
        makers["ours, k x top-1"] = lambda: k_times_top_1(cell)
    makers["dense gated"] = lambda: dense(cell, glu=True)
    makers["ours gated"] = lambda: ours(cell, activation="swiglu")
    makers["mixtral grouped_mm"] = lambda: mixtral(cell, "grouped_mm")
    if cell.has_quadratic:
        makers["mixtral eager"] = lambda: mixtral(cell, "eager")
        makers["autoep"] = lambda: autoep(cell)
    if rows * cell.choices * 3 * width * cell.ffn_size * dtype.itemsize <= MOST_BYTES_BATCHED:
        makers["mixtral batched_mm"] = lambda: mixtral(cell, "batched_mm")

    steps: Steps = {}
    if names is None:
        steps["floor"] = Floor(cell, dtype)
    for name, make in makers.items():
        if names is not None and name not in names:
            continue
        copies = cell.choices if name.startswith("dense") else 1
        step = steps[name] = Step(*make(), rows * copies, width, dtype)
        if name == "ours":  # the others directly after it
            forced = {key: ForcedStep(step, products) for key, products in FORCED.items()}
            steps |= {key: own for key, own in forced.items() if names is None or key in names}
    return steps


def measure(steps: Steps, rounds: int) -> dict[str, list[float]]:
    """Seconds, in interleaved rounds after one that does not count.

    On one thread they are this process's CPU time; threads that wait for each other spend it too, so of several
    threads the wall's clock counts.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begin = clock()
            step()
            if turn:
                times[name].append(clock() - begin)
            if isinstance(step, Step):
                step.free_gradients()
    return times


def choice(cell: Cell, steps: Steps) -> str:
    return chosen_products(cell, cast(MoELayer, cast(Step, steps["ours"]).module))


@app.command()
def speed(
    grid: Grid = Grid.AXES,
    rounds: Rounds = 5,
    dtype: str = "float32",
    threads: Annotated[int, typer.Option(min=1, help="several need as many free cores")] = 1,
    name: str = "moe_layer_speed",
) -> None:
    """Our layer against the floor, a dense network, DeepSpeed and transformers."""
    start()
    torch.set_num_threads(threads)
    recorder = Recorder(name, f"The expert layer, forward and backward, {dtype}")
    results: list[Result] = []
    cells = GRIDS[grid.value]
    for cell in cells:
        torch.manual_seed(0)
        steps = contestants(cell, getattr(torch, dtype))
        times = measure(steps, rounds)
        saved = {key: step.saved_bytes() for key, step in steps.items() if type(step) is Step}
        results.append(Result(cell, choice(cell, steps), times, saved))
        del steps
        gc.collect()
        # After every size, so that a run that is cut short has what it measured.
        seconds = "cpu_s" if threads == 1 else "wall_s"
        numbers = {
            str(r.cell): {seconds: r.times, "saved_bytes": r.saved_bytes, "products": r.products} for r in results
        }
        notes = speed_notes(results, len(cells), rounds, dtype, threads)
        recorder.write(HEADER, [peers_row(result) for result in results], notes, {"cells": numbers})


@app.command()
def bfloat16(rounds: Rounds = 5, name: str = "moe_layer_bfloat16") -> None:
    """bfloat16 against float32: run it with ONEDNN_MAX_CPU_ISA=AVX2 for a processor without bfloat16 arithmetic."""
    recorder = Recorder(name, "bfloat16 against float32")
    start()
    torch.set_num_threads(1)
    rows, results, numbers = [], [], {}
    for cell in BFLOAT16:
        torch.manual_seed(0)
        in_both: Steps = {}
        products = {}
        for dtype in ("float32", "bfloat16"):
            emulated = dtype == "bfloat16" and not multiplies_bfloat16()
            names = OWN_IN_BFLOAT16 if emulated and cell.num_tokens > 512 else ALL_IN_BFLOAT16
            steps = contestants(cell, getattr(torch, dtype), names)
            products[dtype] = choice(cell, steps)
            in_both |= {f"{key} {dtype}": step for key, step in steps.items()}
        times = measure(in_both, rounds)
        of = {
            dtype: Result(cell, chosen, {k.removesuffix(f" {dtype}"): t for k, t in times.items() if dtype in k}, {})
            for dtype, chosen in products.items()
        }
        del in_both, steps
        gc.collect()
        rows += [bfloat16_row(of["float32"], "float32"), bfloat16_row(of["bfloat16"], "bfloat16", of["float32"])]
        results.append(of["bfloat16"])
        numbers[str(cell)] = {"cpu_s": times, "products": products}
        recorder.write(BFLOAT16_HEADER, rows, bfloat16_notes(results, len(BFLOAT16), rounds), {"cells": numbers})


if __name__ == "__main__":
    app()
