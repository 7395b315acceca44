"""Finds slow GPUs and links: ``python -m m6.slurm.sniff REPORTS`` on every rank.

A matmul finds slow GPUs. All-reduce and all-to-all between pairs of neighbouring nodes find slow links. Each node is
measured with the node before it and with the node after it, and its better result counts. So a node is reported only if
it is slow with both neighbours. A node slower than the median by more than SNIFF_TOLERANCE gets a line in its report.
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

from m6.runs.processes import Runtime, own_device, start

_REPEATS = 10


def outliers(speeds: dict[str, float], tolerance: float) -> dict[str, float]:
    """Returns the entries slower than ``(1 - tolerance)`` times the median."""
    median = statistics.median(speeds.values())
    return {name: speed for name, speed in speeds.items() if speed < (1 - tolerance) * median}


def matmul_flops(device: torch.device) -> float:
    """Measures the FLOP/s of a square matmul; the median of several runs."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _median_s(lambda: a @ b, device)


def exchange_bytes_per_s(group: dist.ProcessGroup, device: torch.device) -> float:
    """Measures the bytes per second sent by a rank in an all-reduce and an all-to-all over ``group``."""
    ranks = dist.get_world_size(group)
    values = torch.ones((2**26 if device.type == "cuda" else 2**16) // ranks * ranks, device=device)
    received = torch.empty_like(values)

    def exchange() -> None:
        dist.all_reduce(values, group=group)
        dist.all_to_all_single(received, values, group=group)

    # An all-reduce moves about twice the bytes of its input, an all-to-all once.
    return 3.0 * values.numel() * values.element_size() / _median_s(exchange, device)


def neighbours(nodes: list[str]) -> list[tuple[str, ...]]:
    """Returns all pairs of consecutive nodes: first disjoint pairs, then the pairs between them.

    Disjoint pairs can be measured at the same time. A single node forms a group of one.
    """
    if len(nodes) == 1:
        return [(nodes[0],)]
    pairs = list(itertools.pairwise(nodes))
    return [*pairs[0::2], *pairs[1::2]]


def measure(runtime: Runtime, node: str, flops: float) -> dict[str, dict[str, float]]:
    """Measures the links of every node and collects its FLOP/s; the result is the same on all ranks.

    Args:
        runtime: this rank.
        node: name of this rank's node.
        flops: of this rank, by ``matmul_flops``.

    Returns:
        {measurement: {node: speed}}. A node is as fast as its slowest rank. For a rank, the better of the exchanges
        with the two neighbours counts.
    """
    node_of_rank: list[str] = [""] * runtime.world_size
    dist.all_gather_object(node_of_rank, node)
    pairs = neighbours(list(dict.fromkeys(node_of_rank)))
    # Make all groups before any measurement: all ranks take part in every new_group and wait for each other there.
    groups = [dist.new_group([rank for rank, name in enumerate(node_of_rank) if name in pair]) for pair in pairs]
    own = [group for pair, group in zip(pairs, groups, strict=True) if node in pair]
    bytes_per_s = max(exchange_bytes_per_s(group, runtime.device) for group in own)
    figures: list[tuple[float, float]] = [(0.0, 0.0)] * runtime.world_size
    dist.all_gather_object(figures, (flops, bytes_per_s))
    speeds: dict[str, dict[str, float]] = {"matmul in TFLOP/s": {}, "exchange in GB/s": {}}
    for name, (rank_flops, rank_bytes_per_s) in zip(node_of_rank, figures, strict=True):
        for kind, speed in (("matmul in TFLOP/s", rank_flops / 1e12), ("exchange in GB/s", rank_bytes_per_s / 1e9)):
            speeds[kind][name] = min(speed, speeds[kind].get(name, speed))
    return speeds


def report(reports: Path, speeds: dict[str, dict[str, float]], tolerance: float) -> None:
    """Replaces the preflight report of each slow node by its slow measurements."""
    problems: dict[str, list[str]] = {}
    for kind, by_node in speeds.items():
        median = statistics.median(by_node.values())
        for node, speed in outliers(by_node, tolerance).items():
            problems.setdefault(node, []).append(f"{kind}: {speed:.3g}, the median of the nodes is {median:.3g}")
    for node, lines in problems.items():
        (reports / f"{node}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Measures all nodes; rank 0 writes the reports.

    Before a rank waits for others, it makes the file REPORTS/products/NODE.RANK. The file shows that its own GPU works.
    """
    reports, node = Path(sys.argv[1]), os.environ["SLURMD_NODENAME"]
    flops = matmul_flops(own_device())
    (reports / "products").mkdir(exist_ok=True)
    (reports / "products" / f"{node}.{os.environ['RANK']}").touch()
    runtime = start(timeout_s=float(os.environ.get("PREFLIGHT_TIMEOUT_S", "300")))
    speeds = measure(runtime, node, flops)
    if runtime.is_main:
        report(reports, speeds, float(os.environ.get("SNIFF_TOLERANCE", "0.1")))
    dist.barrier()
    if runtime.is_main:
        (reports / "sniffed").touch()  # without this file, the job assumes that the test crashed or hung


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])  # the first run warms up


if __name__ == "__main__":
    main()
