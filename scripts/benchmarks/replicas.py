"""What the comparison of replicas costs, beside the steps of the run, on two ranks.

PYTHONPATH=. torchrun --nproc-per-node 2 scripts/benchmarks/replicas.py [CONFIG]      (default: configs/m6_smoke.json)

It needs the data of the configuration, by default that of scripts/smoke.sh.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch.distributed as dist

from m6.runs.signals import Requests
from m6.training.replicas import find_difference
from scripts.benchmarks.record import Recorder, spread
from scripts.benchmarks.train_step import Run

ROOT = Path(__file__).resolve().parents[2]
WARM_UP, ROUNDS, INTERVAL_STEPS = 3, 24, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "m6_smoke.json")
    arguments = parser.parse_args()
    recorder = Recorder("replicas", "Replicas that are compared by hashes")
    layout = ["train_micro_batch_size_per_gpu=8", "train_batch_size=16", "m6.pseudo_to_real=null"]
    run = Run(arguments.config, [*layout, "m6.data.num_workers=0"], num_workers=0)
    steps: list[float] = []
    comparisons: list[float] = []
    for number in range(WARM_UP + ROUNDS):
        batches = run.micro_batches()
        dist.barrier()
        begin = time.perf_counter()
        run.step(number, batches, Requests)
        dist.barrier()
        steps.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        assert find_difference(run.engine.replicated(), run.runtime) is None
        comparisons.append(time.perf_counter() - begin)
    steps, comparisons = steps[WARM_UP:], comparisons[WARM_UP:]
    shares = [100 * own / step / INTERVAL_STEPS for own, step in zip(comparisons, steps, strict=True)]
    megabytes = sum(each.data.numel() * each.data.element_size() for each in run.engine.replicated()) / 1e6
    if dist.get_rank() == 0:
        header = ["compared, MB", "step, s", "comparison, s", f"share of the time at one in {INTERVAL_STEPS} steps, %"]
        row = [f"{megabytes:.1f}", spread(steps), spread(comparisons), spread(shares)]
        notes = f"""\
`{arguments.config.name}` on two ranks over gloo, micro-batches of 8, ZeRO stage 0, without the Pseudo stage. Medians
with the 10th and 90th percentile of {ROUNDS} steps, each followed by a comparison, after {WARM_UP} others."""
        recorder.write(header, [row], notes, {"step_s": steps, "comparison_s": comparisons, "megabytes": megabytes})


if __name__ == "__main__":
    main()
