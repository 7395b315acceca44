"""How far the planner's assumptions about matrix products are from those that ``m6 plan calibrate`` measured on a GPU.

It needs no GPU: it reads ``results/gpu_profile.json``, and predicts its products by the data sheet alone.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from m6.config.run import load_config
from m6.planning.cost.compute_time import ComputeTime
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.work import Matmul
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.profile import MatmulPoint, Profile, load_profile
from m6.training.sizes import full_row
from scripts.benchmarks.record import RESULTS, ROOT, Recorder

CLUSTER = ROOT / "configs" / "clusters" / "h100_x128.json"
LEAST_S = 2e-5  # what is shorter measures launches, which the planner counts apart


def assumed() -> ComputeTime:
    """The planner's prices of products on the device, without measurements."""
    config = load_config(ROOT / "configs" / "papers" / "m6t_base.json")
    memory = MemoryModel(config, Profile(), full_row(config), config.last_sharing)
    return ComputeTime(config, memory, load_cluster(CLUSTER).nodes[0], Profile())


def seconds(point: MatmulPoint) -> float:
    return 2.0 * point.m * point.n * point.k * point.count / point.flops


def product(point: MatmulPoint) -> Matmul:
    return Matmul(point.m, point.n, point.k, point.dtype, point.count, grouped=point.count > 1)


def main() -> None:
    recorder = Recorder("gpu_products", "Matrix products of a GPU, assumed and measured")
    profile, model = load_profile(RESULTS / "gpu_profile.json"), assumed()
    points = [point for point in profile.matmul if seconds(point) >= LEAST_S]
    rows = []
    for dtype in ("bf16", "fp16", "fp32"):
        for kind, grouped in (("one product", False), ("grouped by expert", True)):
            own = [point for point in points if point.dtype == dtype and (point.count > 1) == grouped]
            errors = [math.log(model.matmul_s(product(point)) / seconds(point)) for point in own]
            best = max(point.flops for point in own)
            rows.append(
                [
                    dtype,
                    kind,
                    str(len(own)),
                    f"{best / 1e12:.0f}",
                    f"{math.expm1(statistics.mean(errors)):+.0%}",
                    f"{math.expm1(statistics.mean(map(abs, errors))):.0%}",
                    f"{math.expm1(min(errors)):+.0%} to {math.expm1(max(errors)):+.0%}",
                ]
            )
    recorder.write(
        ["type", "products", "sizes", "fastest, TFLOP/s", "mean error", "mean size of the error", "least and most"],
        rows,
        f"Measured: {profile.source}. Assumed: the data sheet of {CLUSTER.stem}, 0.7 of its FLOP/s and 0.8 of its "
        "bandwidth, and 10 microseconds for each expert where PyTorch has no kernel for all of them, here for fp16 and "
        "fp32. Errors are means of logarithms; products below 20 microseconds are left out. TF32 is off.",
        {"points": len(points)},
    )


if __name__ == "__main__":
    main()
