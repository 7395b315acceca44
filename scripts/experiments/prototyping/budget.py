"""Many prototypes in a given time: few steps with capacity "k", or ten times as many with capacity "1".

From the root of the repository, with the data of README.md:

    python -m scripts.experiments.prototyping.budget --seeds 3

The time is that of the plan of 10 trillion parameters, whose steps take ten times as long with capacity "k": nearly all
of a step is computing and exchanging the rows of experts. Each finished run adds a row to budget.csv.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path

from m6.runs.processes import start
from scripts.experiments.experiment import ResultTable, code_version, train
from scripts.experiments.prototyping.grid import CONFIG, FOLDER, summary

NUM_EXPERTS, NUM_PROTOTYPES = 32, 16
STEPS = {"k": 200, "1": 2000}
"""Training steps by rule of capacity, in the order in which they are trained."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... below this")
    table = ResultTable(FOLDER / "budget.csv", ("capacity", "seed"))
    runtime, code = start(), code_version()
    for seed, (rule, steps) in product(range(parser.parse_args().seeds), STEPS.items()):
        if table.holds({"capacity": rule, "seed": seed}):
            continue
        overrides = [
            f"m6.moe.num_experts={NUM_EXPERTS}",
            f"m6.moe.num_prototypes={NUM_PROTOTYPES}",
            f'm6.moe.capacity_rule="{rule}"',
            "m6.moe.min_capacity=1",
            f"m6.training.total_steps={steps}",
            f"m6.schedule.warmup_steps={steps // 10}",
            f"m6.evaluation.interval_steps={steps}",
            f"m6.checkpoint.interval_steps={steps}",
            f"m6.training.seed={seed}",
        ]
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            config, metrics = train(CONFIG, overrides, Path(folder) / "run", runtime)
        figures = summary(config.model, config.m6.data.sequence_length, metrics)
        cpu_s = round(time.process_time() - begin, 1)
        table.append({"capacity": rule, "seed": seed, **figures, "cpu_s": cpu_s, "code": code})
        print(f"{table.path.name}: capacity {rule}, seed {seed}, {cpu_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
