"""How fast the expert layer is, forward and backward, and how much it keeps; README.md says how to read it."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from moe_contestants import CAPACITY_FACTOR, Cell, Floor, Step, autoep, deepspeed_moe, dense, mixtral, ours, switch
from record import Recorder, spread

from m6.training.runtime import start

app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)

SMALL = [
    Cell(2048, 256, 8),
    Cell(2048, 256, 64),
    Cell(2048, 256, 16, num_prototypes=2),
    Cell(2048, 256, 32, num_prototypes=4),
    Cell(4096, 256, 16),
    Cell(2048, 512, 8),
]
FULL = [
    Cell(tokens, width, experts, prototypes, top_k)
    for tokens in (2048, 8192, 16384)
    for width in (256, 512, 1024)
    for experts in (8, 32, 128, 512)
    for prototypes, top_k in ((1, 1), (1, 2), (2, 1), (4, 1), (8, 1))
    if 8 * experts * width**2 * 4 <= 1 << 30  # all contestants' weights are in memory together
]
GRIDS = {"small": SMALL, "full": FULL}
# Their backward pass makes a gradient of the whole stack for each expert: time quadratic in the number of experts.
QUADRATIC = {"autoep", "mixtral eager"}
MOST_EXPERTS_QUADRATIC = 32
# One copy of a weight matrix for each row.
MOST_BYTES_BATCHED = 1 << 30

HEADER = [
    "size",
    "rows per expert",
    "dense in ms",
    "ours / dense",
    "ours / floor",
    "recompute / ours",
    "ours / better DeepSpeed",
    "ours / Switch",
    "gated: ours / dense",
    "gated: ours / Mixtral grouped_mm",
    "gated: ours / slowest",
    "kept: ours, recompute / dense",
]

Grid = Annotated[str, typer.Option(help="small or full")]
Rounds = Annotated[int, typer.Option(help="measurements of each contestant, in turn")]


def contestants(cell: Cell, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """By name; the gated ones have three matrices and stand against a gated dense network."""
    rows, width = cell.num_tokens, cell.hidden_size

    def step(made: tuple[Any, Any], copies: int = 1) -> Step:
        return Step(*made, rows * copies, width, dtype)

    steps: dict[str, Callable[[], None]] = {
        "floor": Floor(cell, dtype),
        "dense": step(dense(cell), cell.choices),
        "ours": step(ours(cell)),
        "ours, recompute": step(ours(cell, recompute_activation=True)),
        "deepspeed drop": step(deepspeed_moe(cell, drop=True)),
        "deepspeed no drop": step(deepspeed_moe(cell, drop=False)),
    }
    if cell.top_k == 1:
        steps["switch"] = step(switch(cell))
    if cell.num_prototypes > 1:
        steps["ours, top-k"] = step(ours(Cell(rows, width, cell.num_experts, 1, cell.choices)))
    steps["dense gated"] = step(dense(cell, glu=True), cell.choices)
    steps["ours gated"] = step(ours(cell, activation="swiglu"))
    steps["mixtral grouped_mm"] = step(mixtral(cell, "grouped_mm"))
    if cell.num_experts <= MOST_EXPERTS_QUADRATIC:
        steps["mixtral eager"] = step(mixtral(cell, "eager"))
        steps["autoep"] = step(autoep(cell))
    if rows * cell.choices * 3 * width * cell.ffn_size * dtype.itemsize <= MOST_BYTES_BATCHED:
        steps["mixtral batched_mm"] = step(mixtral(cell, "batched_mm"))
    return steps


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of this process's CPU time, in interleaved rounds after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            begin = time.process_time()
            step()
            if turn:
                times[name].append(time.process_time() - begin)
            if isinstance(step, Step):
                step.free_gradients()
    return times


def ratios(times: dict[str, list[float]], of: str, to: str) -> list[float]:
    """How many times faster ``of`` is than ``to``, round by round."""
    return [b / a for a, b in zip(times[of], times[to], strict=True)]


@app.command()
def speed(grid: Grid = "small", rounds: Rounds = 5, dtype: str = "float32", name: str = "moe_layer_speed") -> None:
    """Our layer against the floor, a dense network, DeepSpeed and transformers."""
    recorder = Recorder(name, f"The expert layer, forward and backward, {dtype}")
    start()
    torch.set_num_threads(1)
    table, numbers, summary = [], {}, []
    for cell in GRIDS[grid]:
        torch.manual_seed(0)
        steps = contestants(cell, getattr(torch, dtype))
        times = measure(steps, rounds)
        saved = {key: step.saved_bytes() for key, step in steps.items() if isinstance(step, Step)}
        del steps
        gc.collect()
        table.append(row(cell, times, saved))
        numbers[str(cell)] = {"cpu_s": times, "saved_bytes": saved, "rows_per_expert": cell.rows_per_expert}
        summary.append((cell, times, saved))
        # After every size, so that a run that is cut short has what it measured.
        recorder.write(HEADER, table, notes(summary, rounds, dtype), {"cells": numbers})


def row(cell: Cell, times: dict[str, list[float]], saved: dict[str, int]) -> list[str]:
    deepspeed = min("deepspeed drop", "deepspeed no drop", key=lambda name: statistics.median(times[name]))
    gated = [name for name in times if name in QUADRATIC or name.startswith("mixtral")]
    slowest = max(gated, key=lambda name: statistics.median(times[name]))
    kept = (saved["ours"] / saved["dense"], saved["ours, recompute"] / saved["dense"])
    return [
        str(cell),
        f"{cell.rows_per_expert:g}",
        f"{1000 * statistics.median(times['dense']):.1f}",
        spread(ratios(times, "ours", "dense")),
        spread(ratios(times, "ours", "floor")),
        spread(ratios(times, "ours, recompute", "ours")),
        spread(ratios(times, "ours", deepspeed), ".2f"),
        spread(ratios(times, "ours", "switch"), ".2f") if "switch" in times else "-",
        spread(ratios(times, "ours gated", "dense gated")),
        spread(ratios(times, "ours gated", "mixtral grouped_mm"), ".2f"),
        f"{statistics.median(ratios(times, 'ours gated', slowest)):.2f} ({slowest})",
        f"{kept[0]:.2f}, {kept[1]:.2f}",
    ]


def notes(summary: list[tuple[Cell, dict[str, list[float]], dict[str, int]]], rounds: int, dtype: str) -> str:
    """The targets, and what was reached."""

    def median(times: dict[str, list[float]], of: str, to: str) -> float:
        return statistics.median(ratios(times, of, to))

    wide = [median(times, "ours", "dense") for cell, times, _ in summary if cell.rows_per_expert >= 256]
    floor = [median(times, "ours", "floor") for _, times, _ in summary]
    peers = [name for name in summary[0][1] if name.startswith("deepspeed")]
    better = [min(median(times, "ours", peer) for peer in peers) for _, times, _ in summary]
    lean = [median(times, "ours, recompute", "ours") for _, times, _ in summary]
    kept = [saved["ours, recompute"] / saved["dense"] for _, _, saved in summary]
    against_top_k = [
        f"{cell}: {median(times, 'ours', 'ours, top-k'):.3f}" for cell, times, _ in summary if "ours, top-k" in times
    ]
    slower = [
        f"{peer} at {cell} ({ratio:.2f})"
        for cell, times, _ in summary
        for peer in times
        if peer in ("deepspeed drop", "deepspeed no drop", "switch", "autoep") or peer.startswith("mixtral")
        for ratio in [median(times, "ours gated" if "mixtral" in peer or peer == "autoep" else "ours", peer)]
        if ratio < 1
    ]
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return f"""\
Speed of the first over speed of the second: above 1, the first is faster. {dtype}, hidden width 4 d; medians with the
10th and 90th percentile over {rounds} interleaved rounds of one process on one thread, in its CPU time, so that
other programs count less; glibc keeps freed memory for all contestants alike. Dense: a network with the same arithmetic
on T K rows, without routing. Floor: the matrix products alone, with equal loads, in memory that is there, and the
router's. DeepSpeed: native MoE, the faster of dropping at capacity {CAPACITY_FACTOR} and of not dropping, one layer for
each prototype; Switch (capacity {CAPACITY_FACTOR}) likewise. Gated: three matrices, against Mixtral's block with
its implementations and AutoEP's experts in their loop for CPUs (their fused SwiGLU needs CUDA); Mixtral takes the K
best of all experts. Eager and AutoEP are here up to {MOST_EXPERTS_QUADRATIC} experts, beyond which their backward pass
is quadratic; batched_mm where its copies of weights fit {MOST_BYTES_BATCHED >> 30} GiB. Tutel is not on PyPI and not
here. Kept: bytes that autograd saves, over those of the dense network. This processor multiplies bfloat16 itself:
{native}.

| target | reached |
| --- | --- |
| at least 0.95 of dense from 256 rows per expert | {reached(wide)} |
| at least 0.92 of the floor everywhere | {reached(floor)} |
| at least 1.35 x the better DeepSpeed mode in the median | {reached(better)} |
| recomputation at most 5 % slower, speed over ours | {reached(lean)} |
| recomputation keeps at most 0.55 of dense | {spread(kept)}, most {max(kept):.3f} |
| k top-1 not slower than one top-k | {"; ".join(against_top_k) or "not measured"} |
| never slower than a peer | {"; ".join(slower) or "never"} |
"""


def reached(speeds: list[float]) -> str:
    """The median over the sizes, and the least."""
    return f"{spread(speeds)}, least {min(speeds):.3f}" if speeds else "not measured"


@app.command()
def bfloat16(rounds: Rounds = 5, name: str = "moe_layer_bfloat16") -> None:
    """bfloat16 against float32: run it with ONEDNN_MAX_CPU_ISA=AVX2 for a processor without bfloat16 arithmetic."""
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    recorder = Recorder(name, "bfloat16 against float32")
    start()
    torch.set_num_threads(1)
    table, numbers = [], {}
    for cell in (Cell(512, 256, 8), Cell(2048, 256, 32, num_prototypes=2)):
        torch.manual_seed(0)
        rows, width = cell.num_tokens, cell.hidden_size
        steps: dict[str, Callable[[], None]] = {
            "ours float32": Step(*ours(cell), rows, width, torch.float32),
            "ours bfloat16": Step(*ours(cell), rows, width, torch.bfloat16),
        }
        if native or cell.num_tokens <= 512:
            steps["dense bfloat16"] = Step(*dense(cell), rows * cell.choices, width, torch.bfloat16)
            steps["deepspeed bfloat16"] = Step(*deepspeed_moe(cell, drop=False), rows, width, torch.bfloat16)
        times = measure(steps, rounds)
        numbers[str(cell)] = times
        for contestant, own in times.items():
            table.append(
                [
                    str(cell),
                    contestant,
                    spread([1000 * t for t in own], ".1f"),
                    spread(ratios(times, contestant, "ours float32")),
                ]
            )
            print(" | ".join(table[-1]), flush=True)
    text = f"""\
Process CPU time in ms and speed over our float32 layer, medians with the 10th and 90th percentile over {rounds}
interleaved rounds on one thread. This processor, as oneDNN is told to see it, multiplies bfloat16 itself: {native}.
Without, the target is 0.5 of float32's speed; PyTorch's own products reach what the dense network shows."""
    recorder.write(["size", "contestant", "ms", "speed over ours float32"], table, text, {"cpu_s": numbers})


if __name__ == "__main__":
    app()
