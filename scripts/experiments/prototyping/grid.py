"""Trains the grid of routings that M6-T (arXiv 2105.15082), section 3 compares, and measures their speed.

From the root of the repository, with the data of README.md:

    python -m scripts.experiments.prototyping.grid train --seeds 3 [--recipe]
    python -m scripts.experiments.prototyping.grid ngrams
    python -m scripts.experiments.prototyping.grid time

``train`` adds a row to results.csv per finished run and leaves out the runs that have one; all configurations of
one seed come before the next seed. With ``--recipe`` it trains with what scripts/experiments/recipe found instead of
AdamW, and adds to results_recipe.csv. ``ngrams`` writes to ngrams.csv what n-gram models of the bytes reach on the same
validation text. ``time`` measures all configurations in one interleaved run and writes speed.csv.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from m6.architecture.settings import ModelSettings
from m6.config.run import load_config
from m6.evaluation.baselines import compute_baselines
from m6.model.parameters import num_parameters
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.runs.signals import Requests
from m6.training.engine.build import build_engine
from m6.training.reporting.interval import training_flops
from m6.training.stages.stage import Stage
from m6.training.train_step import TrainStep
from scripts.experiments.experiment import ResultTable, code_version, train

FOLDER = Path(__file__).resolve().parent
CONFIG = FOLDER / "config.json"
RESULTS = FOLDER / "results.csv"
RECIPE_RESULTS = FOLDER / "results_recipe.csv"
SPEED = FOLDER / "speed.csv"
NGRAMS = FOLDER / "ngrams.csv"
AUX_LOSS_WEIGHT = 0.01
RECIPE = (
    "optimizer.type=Muon",
    "optimizer.params.lr=0.006",  # 0.0042 sqrt(128 / width), as the recipe has it
    "optimizer.params.adamw_lr=0.024",
    "optimizer.params.momentum=0.9",
    "m6.model.rotary_base=10000",
    "m6.schedule.decay=wsd",
    "m6.schedule.decay_share=0.3",
)


class Routing(NamedTuple):
    """Which experts compute a token, and whether the gates of its choices are divided by their sum."""

    num_prototypes: int
    top_k: int
    normalized: bool = False


ROUTINGS = {
    "top-1": Routing(1, 1),
    "top-2": Routing(1, 2),
    "top-4": Routing(1, 4),
    "2 top-1": Routing(2, 1),
    "4 top-1": Routing(4, 1),
    "normalized top-2": Routing(1, 2, normalized=True),
    "normalized top-4": Routing(1, 4, normalized=True),
    "normalized 2 top-1": Routing(2, 1, normalized=True),
    "normalized 4 top-1": Routing(4, 1, normalized=True),
}


@dataclass(frozen=True)
class Case:
    """One configuration of the grid.

    Attributes:
        capacity: the rule of ``MoEConfig``, or "none", with which nothing is dropped.
        moe_attention: experts on the attention projections too, see ``RETIRED``.
    """

    routing: str
    capacity: str
    balanced: bool
    moe_attention: bool = False

    def identity(self) -> dict[str, str]:
        """The columns that name it."""
        return {
            "routing": self.routing,
            "capacity": self.capacity,
            "balanced": "yes" if self.balanced else "no",
            "moe_attention": "yes" if self.moe_attention else "no",
        }

    def _capacity(self) -> list[str]:
        if self.capacity == "none":
            return ["m6.moe.capacity_factor=null", "m6.moe.eval_capacity_factor=null"]
        return [f'm6.moe.capacity_rule="{self.capacity}"']

    def overrides(self) -> list[str]:
        routing = ROUTINGS[self.routing]
        return [
            f"m6.moe.num_prototypes={routing.num_prototypes}",
            f"m6.moe.top_k={routing.top_k}",
            f"m6.moe.normalize_gates={str(routing.normalized).lower()}",
            *self._capacity(),
            f"m6.moe.aux_loss_weight={AUX_LOSS_WEIGHT if self.balanced else 0.0}",
        ]


def cases() -> Iterator[Case]:
    """The grid; with one expert a token both capacities are the same.

    Without a capacity imbalance drops nothing, which tells its own effect from that of dropping. Normalized gates tell
    which experts are chosen from how much they weigh: a prototype's softmax is over fewer experts, so its gates are
    larger.
    """
    plain = [name for name, routing in ROUTINGS.items() if not routing.normalized]
    for routing, capacity, balanced in product(plain, ("k", "1"), (True, False)):
        if (routing, capacity) != ("top-1", "1"):
            yield Case(routing, capacity, balanced)
    for routing in ROUTINGS:
        if routing not in plain:
            yield Case(routing, "k", balanced=True)
    for routing, balanced in product(("top-1", "4 top-1"), (True, False)):
        yield Case(routing, "none", balanced)


RETIRED = tuple(Case(routing, "k", balanced=True, moe_attention=True) for routing in ("top-1", "2 top-1", "4 top-1"))
"""Configurations with rows in the results whose code is deleted; commit 41dac46 is the last that has it."""


def run_grid(seeds: int, recipe: bool) -> None:
    """Trains what is missing in results.csv, or with the recipe in results_recipe.csv."""
    table = ResultTable(RECIPE_RESULTS if recipe else RESULTS, (*Case("top-1", "k", True).identity(), "seed"))
    runtime, code = start(), code_version()
    for seed, case in product(range(seeds), cases()):
        identity = {**case.identity(), "seed": seed}
        if table.holds(identity):
            continue
        begin = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            overrides = [*case.overrides(), *(RECIPE if recipe else ()), f"m6.training.seed={seed}"]
            config, metrics = train(CONFIG, overrides, Path(folder) / "run", runtime)
        cpu_s = time.process_time() - begin
        table.append(
            {
                **identity,
                **summary(config.model, config.m6.data.sequence_length, metrics),
                "cpu_s": round(cpu_s, 1),
                "code": code,
            }
        )
        print(f"{table.path.name}: {identity}, {cpu_s:.0f} s", flush=True)


def summary(model: ModelSettings, sequence_length: int, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run's row says: its last validation, and its routing as the mean over the second half of training.

    ``load_cv`` and ``dropped`` are means over the routers; the load is that of the steps of one log interval, after
    dropping. ``flops_per_token`` is forward and backward without the output matrix, of the choices that were computed.
    """
    training = [entry for entry in metrics if "loss" in entry]
    validation = metrics[-1]["validation"]
    late = [entry["experts"] for entry in training[len(training) // 2 :]]
    dropped = np.mean([experts["dropped_fraction"] for experts in late], axis=0)
    counts = num_parameters(model)
    return {
        "steps": training[-1]["step"],
        "tokens": training[-1]["tokens_seen"],
        "parameters": counts["total"],
        "active_parameters": counts["active_per_token"],
        "validation_lm": round(validation["language_modelling"], 5),
        "validation_captions": round(validation["image_captioning"], 5),
        "training_losses": " ".join(f"{loss:.4f}" for loss in tenths([entry["loss"] for entry in training])),
        "load_cv": round(float(np.mean([experts["load_cv"] for experts in late])), 4),
        "dropped": round(float(dropped.mean()), 4),
        "unused_experts": round(float(np.mean([experts["unused_experts"] for experts in late])), 3),
        "flops_per_token": round(flops_per_token(model, sequence_length, dropped)),
    }


def tenths(losses: list[float]) -> list[float]:
    """The means of ten equal parts of training; of each step where there are fewer."""
    return [float(np.mean(part)) for part in np.array_split(losses, min(10, len(losses)))]


def flops_per_token(model: ModelSettings, sequence_length: int, dropped: np.ndarray) -> float:
    """FLOPs of forward and backward for one token of text in the layers, the output matrix left out.

    Args:
        dropped: [sparse layers] share of the choices that found their expert full and so cost nothing.
    """
    width = model.hidden_size
    per_choice = np.full(model.num_moe_layers, 2 * width * model.ffn_hidden_size)
    choices = model.moe_config().experts_per_token
    counts = num_parameters(model)
    return training_flops(model, 1, 0, 0, sequence_length) - 6 * (
        counts["norms"] + choices * float(dropped @ per_choice)
    )


def measure_ngrams() -> None:
    """Writes the mean loss in nats per byte of n-gram models of all training rows, on the batches of validation."""
    config = load_config(CONFIG)
    table = ResultTable(NGRAMS, ("objective", "model"))
    NGRAMS.unlink(missing_ok=True)
    for objective, losses in compute_baselines(config, open_data(config), config.m6.evaluation.num_rows).items():
        for model, loss in losses.items():
            table.append({"objective": objective, "model": model, "loss": round(loss, 5)})


def measure_speed(rounds: int) -> None:
    """Writes the CPU time of a training step of every case, taken in turns."""
    runtime, steps, all_cases = start(), [], list(cases())
    for case in all_cases:
        config = load_config(CONFIG, tuple(case.overrides()))
        data = open_data(config)
        steps.append(TrainStep(build_engine(config, runtime), config, runtime, Stage(config, None)))
    batches = [[data.micro_batch(index)] for index in range(rounds + 1)]
    times: list[list[float]] = [[] for _ in steps]
    for number, batch in enumerate(batches):
        for step, measured in zip(steps, times, strict=True):
            begin = time.process_time()
            step(number, batch, Requests)
            if number > 0:  # the first makes buffers
                measured.append(1e3 * (time.process_time() - begin))
    table, code = ResultTable(SPEED, tuple(Case("top-1", "k", True).identity())), code_version()
    retired = [row for row in table.rows() if row["moe_attention"] == "yes"]
    SPEED.unlink(missing_ok=True)
    for case, measured in zip(all_cases, times, strict=True):
        low, high = np.percentile(measured, [10, 90])
        figures = {"ms": statistics.median(measured), "ms_10": low, "ms_90": high}
        table.append(
            {
                **case.identity(),
                **{name: round(value, 2) for name, value in figures.items()},
                "rounds": rounds,
                "code": code,
            }
        )
    for row in retired:  # cannot be measured again
        table.append(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... below this")
    training.add_argument("--recipe", action="store_true", help="with the optimizer and schedule of the recipe")
    commands.add_parser("ngrams")
    commands.add_parser("time").add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    if arguments.command == "train":
        run_grid(arguments.seeds, arguments.recipe)
    elif arguments.command == "ngrams":
        measure_ngrams()
    else:
        measure_speed(arguments.rounds)


if __name__ == "__main__":
    main()
