"""Do all GPUs compute and exchange data at the same speed? ``python -m m6.slurm.sniff REPORTS`` on every rank.

A matmul finds a slow GPU. All-reduce and all-to-all between neighbouring nodes, each node once with the one before
and once with the one after, find a slow link: only a node that is slow with both is to blame. A node that falls
behind the median by more than SNIFF_TOLERANCE gets a line in its report.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from m6.runs.processes import Runtime, start

_REPEATS = 10


def outliers(speeds: dict[str, float], tolerance: float) -> dict[str, float]:
    """The entries that are slower than the median by more than a share ``tolerance`` of it."""
    median = statistics.median(speeds.values())
    return {name: speed for name, speed in speeds.items() if speed < (1 - tolerance) * median}


def matmul_flops(device: torch.device) -> float:
    """FLOP/s of a square matmul, median of a few."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _median_s(lambda: a @ b, device)


def exchange_bytes_per_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes that a rank sends a second in an all-reduce and an all-to-all over ``group``."""
    ranks = dist.get_world_size(group)
    values = torch.ones((2**26 if device.type == "cuda" else 2**16) // ranks * ranks, device=device)
    received = torch.empty_like(values)

    def exchange() -> None:
        dist.all_reduce(values, group=group)
        dist.all_to_all_single(received, values, group=group)

    return 3.0 * values.numel() * values.element_size() / _median_s(exchange, device)


def neighbours(nodes: list[str]) -> list[tuple[str, ...]]:
    """Pairs that can exchange data side by side, then the pairs between them; a single node is by itself."""
    if len(nodes) == 1:
        return [(nodes[0],)]
    pairs = list(itertools.pairwise(nodes))
    return [*pairs[0::2], *pairs[1::2]]


def measure(runtime: Runtime, node: str) -> dict[str, dict[str, float]]:
    """Per measurement the speed of every node, equal on all ranks: its slowest GPU, its best exchange."""
    places: list[str] = [""] * runtime.world_size
    dist.all_gather_object(places, node)
    own_matmul, own_exchange = matmul_flops(runtime.device), 0.0
    for pair in neighbours(list(dict.fromkeys(places))):
        group = dist.new_group([rank for rank, place in enumerate(places) if place in pair])
        if node in pair:
            own_exchange = max(own_exchange, exchange_bytes_per_s(group, runtime.device))
    figures: list[tuple[float, float]] = [(0.0, 0.0)] * runtime.world_size
    dist.all_gather_object(figures, (own_matmul, own_exchange))
    speeds: dict[str, dict[str, float]] = {"matmul in TFLOP/s": {}, "exchange in GB/s": {}}
    for place, (flops, bytes_per_s) in zip(places, figures, strict=True):
        for kind, speed in (("matmul in TFLOP/s", flops / 1e12), ("exchange in GB/s", bytes_per_s / 1e9)):
            speeds[kind][place] = min(speed, speeds[kind].get(place, speed))
    return speeds


def report(reports: Path, speeds: dict[str, dict[str, float]], tolerance: float) -> None:
    """Writes a node's report anew if it falls behind."""
    problems: dict[str, list[str]] = {}
    for kind, by_node in speeds.items():
        median = statistics.median(by_node.values())
        for node, speed in outliers(by_node, tolerance).items():
            problems.setdefault(node, []).append(f"{kind}: {speed:.3g}, the median of the nodes is {median:.3g}")
    for node, lines in problems.items():
        (reports / f"{node}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    runtime = start(timeout_s=float(os.environ.get("PREFLIGHT_TIMEOUT_S", "300")))
    speeds = measure(runtime, os.environ["SLURMD_NODENAME"])
    if runtime.is_main:
        report(Path(sys.argv[1]), speeds, float(os.environ.get("SNIFF_TOLERANCE", "0.1")))
    dist.barrier()
    if runtime.is_main:
        (Path(sys.argv[1]) / "sniffed").touch()  # without it a test that crashed or hung would pass for a good one


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])  # the first one warms up


if __name__ == "__main__":
    main()
