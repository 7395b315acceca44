"""What ``"deterministic": "any_world"`` costs: its steps beside plain ones, on two ranks.

PYTHONPATH=. torchrun --nproc-per-node 2 scripts/benchmarks/any_world.py [CONFIG]      (default: configs/m6_smoke.json)

It needs the data of the configuration, by default that of scripts/smoke.sh.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch.distributed as dist

from m6.runs.signals import Requests
from scripts.benchmarks.record import Recorder, spread
from scripts.benchmarks.train_step import Run

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCHES = (1, 4)
WARM_UP, ROUNDS = 3, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=ROOT / "configs" / "m6_smoke.json")
    arguments = parser.parse_args()
    recorder = Recorder("any_world", "Sums that do not depend on the number of ranks")
    table, numbers = [], {}
    for stage in (0, 1):
        for accumulation in MICRO_BATCHES:
            layout = [
                f"zero_optimization.stage={stage}",
                "train_micro_batch_size_per_gpu=8",
                f"train_batch_size={16 * accumulation}",
                "m6.pseudo_to_real=null",
                "m6.data.num_workers=0",
            ]
            runs = [
                Run(arguments.config, [*layout, *mode], num_workers=0)
                for mode in ([], ["m6.training.deterministic=any_world"])
            ]
            seconds: list[list[float]] = [[], []]
            for number in range(WARM_UP + ROUNDS):
                batches = runs[0].micro_batches()
                for run, times in zip(runs, seconds, strict=True):
                    dist.barrier()
                    begin = time.perf_counter()
                    run.step(number, batches, Requests)
                    dist.barrier()
                    times.append(time.perf_counter() - begin)
            plain, ours = (times[WARM_UP:] for times in seconds)
            ratios = [own / other for own, other in zip(ours, plain, strict=True)]
            table.append([str(stage), str(accumulation), spread(plain), spread(ours), spread(ratios)])
            numbers[f"stage {stage}, {accumulation} micro-batches"] = {"plain_s": plain, "any_world_s": ours}
            for run in runs:
                run.engine.release()
    if dist.get_rank() == 0:
        header = ["ZeRO stage", "micro-batches of a rank", "plain step, s", "any_world, s", "ratio"]
        notes = f"""\
`{arguments.config.name}` on two ranks over gloo, micro-batches of 8, without the Pseudo stage. Both take turns step by
step on equal batches that were packed before. Medians with the 10th and 90th percentile of {ROUNDS} steps after
{WARM_UP} others."""
        recorder.write(header, table, notes, numbers)


if __name__ == "__main__":
    main()
