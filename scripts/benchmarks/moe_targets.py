"""What was measured of expert layers, beside what was aimed at."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from m6.formatting import markdown_table
from scripts.benchmarks.moe_contestants import CAPACITY_FACTOR, FORCED, MOST_BYTES_BATCHED, Cell, multiplies_bfloat16
from scripts.benchmarks.record import spread

DEEPSPEED = ("deepspeed drop", "deepspeed no drop")
PLAIN_PEERS = (*DEEPSPEED, "switch")
GATED_PEERS = ("mixtral grouped_mm", "mixtral eager", "mixtral batched_mm", "autoep")


@dataclass(frozen=True)
class Result:
    """One size: seconds of each contestant, round by round, and bytes that each keeps for its backward pass."""

    cell: Cell
    products: str
    times: dict[str, list[float]]
    saved_bytes: dict[str, int]

    def ratios(self, of: str, to: str) -> list[float]:
        """How many times faster ``of`` is than ``to``, round by round."""
        return [b / a for a, b in zip(self.times[of], self.times[to], strict=True)]

    def speed(self, of: str, to: str) -> float:
        return statistics.median(self.ratios(of, to))

    def shown(self, of: str, to: str, form: str = ".3f") -> str:
        return spread(self.ratios(of, to), form) if of in self.times and to in self.times else "-"

    def best(self, names: Sequence[str]) -> str:
        """The fastest of those that are here."""
        return min((name for name in names if name in self.times), key=lambda name: statistics.median(self.times[name]))

    def kept(self, name: str) -> float:
        return self.saved_bytes[name] / self.saved_bytes["dense"]

    def slower_than(self) -> list[str]:
        """The peers that are faster than our layer."""
        rivals = {**dict.fromkeys(PLAIN_PEERS, "ours"), **dict.fromkeys(GATED_PEERS, "ours gated")}
        speeds = {peer: self.speed(own, peer) for peer, own in rivals.items() if peer in self.times}
        return [f"{peer} at {self.cell} ({speed:.2f})" for peer, speed in speeds.items() if speed < 1]


HEADER = [
    "size",
    "rows per expert",
    "dense in ms",
    "ours / dense",
    "ours / floor",
    "ours / better DeepSpeed",
    "ours / Switch",
    "gated: ours / dense",
    "gated: ours / Mixtral grouped_mm",
    "gated: ours / Mixtral eager",
    "gated: ours / AutoEP",
]


def peers_row(result: Result) -> list[str]:
    return [
        str(result.cell),
        f"{result.cell.rows_per_expert:g}",
        f"{1000 * statistics.median(result.times['dense']):.1f}",
        result.shown("ours", "dense"),
        result.shown("ours", "floor"),
        result.shown("ours", result.best(DEEPSPEED), ".2f"),
        result.shown("ours", "switch", ".2f"),
        result.shown("ours gated", "dense gated"),
        result.shown("ours gated", "mixtral grouped_mm", ".2f"),
        result.shown("ours gated", "mixtral eager", ".2f"),
        result.shown("ours gated", "autoep", ".2f"),
    ]


OWN_HEADER = [
    "size",
    "chosen products",
    "chosen / grouped_mm",
    "chosen / loop",
    "k top-1 / k x top-1",
    "k top-1 / top-k",
    "recompute / ours",
    "kept: ours / dense",
    "kept: recompute / dense",
]


def own_row(result: Result) -> list[str]:
    return [
        str(result.cell),
        result.products,
        *(result.shown("ours", forced) for forced in FORCED),
        result.shown("ours", "ours, k x top-1"),
        result.shown("ours", "ours, top-k"),
        result.shown("ours, recompute", "ours"),
        f"{result.kept('ours'):.2f}",
        f"{result.kept('ours, recompute'):.2f}",
    ]


def reached(speeds: Sequence[float]) -> str:
    """The median over the sizes, and the least."""
    return f"{spread(speeds)}, least {min(speeds):.3f}" if speeds else "not measured"


def targets(results: Sequence[Result]) -> str:
    """A table: what was aimed at, what was reached at these sizes."""
    wide = [result for result in results if result.cell.rows_per_expert >= 256]
    prototypes = [result for result in results if result.cell.num_prototypes > 1]
    kept = [result.kept("ours, recompute") for result in results]
    return markdown_table(
        ["target", "reached"],
        [
            ["at least 0.95 of dense from 256 rows per expert", reached([r.speed("ours", "dense") for r in wide])],
            ["at least 0.92 of the floor everywhere", reached([r.speed("ours", "floor") for r in results])],
            [
                "at least 1.35 x the better DeepSpeed mode in the median",
                reached([r.speed("ours", r.best(DEEPSPEED)) for r in results]),
            ],
            ["never slower than a peer", "; ".join(each for r in results for each in r.slower_than()) or "never"],
            [
                "k top-1 not slower than k x top-1",
                reached([r.speed("ours", "ours, k x top-1") for r in prototypes]),
            ],
            ["k top-1 not slower than top-k", reached([r.speed("ours", "ours, top-k") for r in prototypes])],
            [
                "the chosen products are the fastest of the three, speed over the faster of grouped_mm and the loop",
                reached([r.speed("ours", r.best(tuple(FORCED))) for r in results]),
            ],
            [
                "recomputation at most 5 % slower, speed over ours",
                reached([r.speed("ours, recompute", "ours") for r in results]),
            ],
            [
                "recomputation keeps at most 0.55 of dense (out of reach with one choice a token: of what dense keeps, "
                "d + 4 d + 4 d numbers a row, x and h alone are (d + 4 d) / 9 d = 0.556)",
                f"{spread(kept)}, most {max(kept):.3f}",
            ],
        ],
    )


def speed_notes(results: Sequence[Result], num_cells: int, rounds: int, dtype: str, threads: int) -> str:
    """What the names mean, our layer against itself, and the targets."""
    clock = (
        "one thread, in its CPU time, so that other programs count less"
        if threads == 1
        else f"{threads} threads, in wall time"
    )
    return f"""\
{len(results)} of {num_cells} sizes. Speed of the first over speed of the second: above 1, the first is faster. {dtype},
hidden width 4 d; medians with the 10th and 90th percentile over {rounds} interleaved rounds of one process on
{clock}; glibc keeps freed memory for all contestants alike.
Dense: a network with the same arithmetic on T K rows, without routing. Floor: the matrix products alone as `torch.mm`
computes them, with equal loads, in memory that is there, and the router's; products that are faster than PyTorch's
may be above it. DeepSpeed: native MoE, the faster of dropping at capacity {CAPACITY_FACTOR} and of not dropping, one
layer for each prototype; Switch (capacity {CAPACITY_FACTOR}) likewise. Gated: three matrices, against Mixtral's block
with its implementations and AutoEP's experts in their loop for CPUs (their fused SwiGLU needs CUDA); Mixtral takes the
K best of all experts. Eager and AutoEP are here up to 32 experts, beyond which their backward pass is quadratic;
batched_mm copies the weights for each row, which from 2,048 tokens on is more than {MOST_BYTES_BATCHED >> 30} GiB.
Tutel is not on PyPI and not here. This processor multiplies bfloat16 itself: {multiplies_bfloat16()}.

Our layer against itself: its choice among products against the same layer with the others; k top-1 against k layers
of top-1 on E / k experts each, outputs summed, and against one layer of top-k; kept are bytes that autograd saves.

{markdown_table(OWN_HEADER, [own_row(result) for result in results])}

{targets(results)}
"""


BFLOAT16_HEADER = [
    "size",
    "type",
    "ours in ms",
    "ours / ours float32",
    "dense / dense float32",
    "gated: ours / ours float32",
    "ours / dense",
    "ours / better DeepSpeed",
    "gated: ours / dense",
    "gated: ours / Mixtral grouped_mm",
    "gated: ours / Mixtral batched_mm",
    "chosen products",
    "chosen / grouped_mm",
    "chosen / loop",
]


def bfloat16_row(result: Result, dtype: str, float32: Result | None = None) -> list[str]:
    """Peers in the same type; with ``float32`` our layers and the dense one also beside themselves in that."""
    slow = {} if float32 is None else {f"{name} float32": own for name, own in float32.times.items()}
    gains = Result(result.cell, result.products, {**result.times, **slow}, {})  # their rounds took turns
    return [
        str(result.cell),
        dtype,
        spread([1000 * time for time in result.times["ours"]], ".1f"),
        *(gains.shown(name, f"{name} float32") for name in ("ours", "dense", "ours gated")),
        result.shown("ours", "dense"),
        result.shown("ours", result.best(DEEPSPEED), ".2f") if DEEPSPEED[0] in result.times else "-",
        result.shown("ours gated", "dense gated"),
        result.shown("ours gated", "mixtral grouped_mm", ".2f"),
        result.shown("ours gated", "mixtral batched_mm", ".2f"),
        result.products,
        *(result.shown("ours", forced) for forced in FORCED),
    ]


def bfloat16_notes(results: Sequence[Result], num_cells: int, rounds: int) -> str:
    slower = [each for result in results for each in result.slower_than()]
    return f"""\
{len(results)} of {num_cells} sizes. Speed of the first over speed of the second, both in the type of the row where
no type is named; process CPU time, medians with the 10th and 90th percentile over {rounds} interleaved rounds of both
types on one thread. The names are explained in moe_layer_speed. This processor, as oneDNN is told to see it, multiplies
bfloat16 itself: {multiplies_bfloat16()}. Where it does not, the target is 0.5 of float32's speed for our layer,
PyTorch's own products reach what the dense network shows, and other layers are here up to 512 tokens. batched_mm is
here where its copies of weights for each row fit {MOST_BYTES_BATCHED >> 30} GiB. Faster than our layer in bfloat16:
{"; ".join(slower) or "none"}.
"""
