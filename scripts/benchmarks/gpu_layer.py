"""How fast the expert layer is on a GPU, forward and backward in bf16, beside other layers and a dense network."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import typer

from m6.runs.processes import start
from scripts.benchmarks.moe_contestants import (
    FORCED,
    Cell,
    ForcedStep,
    Step,
    deepspeed_moe,
    dense,
    k_times_top_1,
    mixtral,
    ours,
    switch,
)
from scripts.benchmarks.record import Recorder, spread

# 16 rows of 512 tokens through all experts of m6t_base, of m6t_10b, and of one of eight GPUs of m6t_100b; then more
# rows, and wider models.
CELLS = (
    Cell(8192, 1024, 32, num_prototypes=2),
    Cell(8192, 1024, 128, num_prototypes=2),
    Cell(8192, 1024, 64, num_prototypes=4),
    Cell(16384, 1024, 32, num_prototypes=4),
    Cell(8192, 2048, 16, num_prototypes=2),
    Cell(8192, 4096, 8, num_prototypes=2),
)
NOTES = (
    "Forward and backward with all gradients, weights and rows in bf16, by CUDA events. Dense: the same arithmetic on "
    "K copies of the tokens. Gated layers have three matrices: compare them with `dense gated`. DeepSpeed's and Switch "
    "have a capacity factor of 1.25; ours drops nothing."
)
Steps = dict[str, Step]

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


def contestants(cell: Cell) -> Steps:
    """By name; the gated ones have three matrices and stand against a gated dense network."""
    makers: dict[str, Callable[[], tuple[Any, Any]]] = {
        "dense": lambda: dense(cell),
        "ours": lambda: ours(cell),
        "k x top-1": lambda: k_times_top_1(cell),
        "dense gated": lambda: dense(cell, glu=True),
        "ours gated": lambda: ours(cell, activation="swiglu"),
        "Mixtral grouped_mm": lambda: mixtral(cell, "grouped_mm"),
        "DeepSpeed": lambda: deepspeed_moe(cell, drop=True),
        "Switch": lambda: switch(cell),
    }
    steps: Steps = {}
    for name, make in makers.items():
        copies = cell.choices if name.startswith("dense") else 1
        steps[name] = Step(*make(), cell.num_tokens * copies, cell.hidden_size, torch.bfloat16)
    steps["ours, loop"] = ForcedStep(steps["ours"], FORCED["ours, loop"])
    return steps


def measure(steps: Steps, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by the card's clock, in turns after three rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-3, rounds):
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            step()
            end.record()
            end.synchronize()
            step.free_gradients()
            if turn >= 0:
                times[name].append(begin.elapsed_time(end))
    return times


def teraflops(cell: Cell, milliseconds: float) -> float:
    """Of our layer, which has two matrices; 6 FLOPs, forward and backward, for each weight that a row meets."""
    flops = 12 * cell.num_tokens * cell.choices * cell.hidden_size * cell.ffn_size
    return flops / milliseconds / 1e9


def table(measured: dict[Cell, dict[str, list[float]]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    others = [name for name in dict.fromkeys(name for times in measured.values() for name in times) if name != "ours"]
    rows = []
    for cell, times in measured.items():
        median = {name: statistics.median(each) for name, each in times.items()}
        ratios = [f"{median[name] / median['ours']:.2f}" if name in median else "" for name in others]
        rows.append(
            [str(cell), spread(times["ours"], ".2f"), f"{teraflops(cell, median['ours']):.0f}", *ratios],
        )
    return ["size", "ours, ms", "ours, TFLOP/s", *(f"{name} / ours" for name in others)], rows


@app.command()
def main(rounds: Annotated[int, typer.Option(min=1, help="measurements of each contestant, in turn")] = 20) -> None:
    recorder = Recorder("gpu_layer", "The expert layer on a GPU")
    torch.set_default_device(start().device)
    measured: dict[Cell, dict[str, list[float]]] = {}
    for cell in CELLS:
        measured[cell] = measure(contestants(cell), rounds)
        torch.cuda.empty_cache()
        recorder.write(*table(measured), NOTES, {"milliseconds": {str(each): measured[each] for each in measured}})


if __name__ == "__main__":
    app()
