"""Trains miniatures of the large configurations, and appends each finished run to results.csv.

    python -m scripts.experiments.large_recipes.train                  # all that is missing, most important first
    python -m scripts.experiments.large_recipes.train m6_10t --variants recipe dense --seeds 1 --untuned
    python -m scripts.experiments.large_recipes.train ngrams           # n-gram models of the same data
    python -m scripts.experiments.large_recipes.train --parallel 15    # on a GPU, under CUDA's MPS

A run has a folder under ``--work``, from which it goes on after an interruption. On a GPU a run computes in the JSON's
own precision. A CPU has no fp16 and takes bf16 instead, which rounds eight times as coarsely.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m6.config.run import RunConfig, load_config, parse_config
from m6.errors import UserError
from m6.evaluation.baselines import compute_baselines
from m6.files import write_json
from m6.planning.booking import book_stage
from m6.planning.machine.cluster import load_cluster
from m6.planning.search.planner import Planner
from m6.planning.search.stages import search_stages, training_stages
from m6.runs.data import open_data
from m6.runs.directory import RunDirectory
from m6.runs.processes import Runtime, start
from m6.training.loop import Trainer
from moe import MoELayer
from moe.autograd import custom_gradient
from moe.config import DispatchDtype
from moe.dispatch import LocalDispatcher
from moe.dispatch_dtype import CODECS, Codec
from moe.experts import Experts
from moe.routing import Routing
from scripts.experiments.experiment import ResultTable, code_version
from scripts.experiments.large_recipes.miniature import (
    RECIPES,
    STEPS,
    Document,
    changed,
    digest,
    miniature,
    variants,
)

HERE = Path(__file__).resolve().parent
RESULTS, PRICES, NGRAMS = HERE / "results.csv", HERE / "prices.json", HERE / "ngrams.csv"
KEY = ("recipe", "variant", "equal", "rate", "seed", "base", "device")
RATES = (0.33, 1.0, 3.0)
GRID = 2 ** (1 / 16)  # a variant has a power of this times the recipe's steps, so that recipes share runs of variants
LONGEST = 2  # times the recipe's steps; a variant whose steps are cheaper still is cut there


@dataclass(frozen=True)
class Case:
    """A run of the table.

    Attributes:
        equal: what it has as much of as the recipe's run: "cost", seconds of the planned full size, or "flops",
            computed in the miniature.
        rate: factor of the learning rates; 1 is the JSON's.
        base: steps of the recipe's run.
    """

    recipe: str
    variant: str
    equal: str
    rate: float
    seed: int
    base: int = STEPS


def _rounded(codec: Codec, rows: Tensor) -> Tensor:
    return codec.decode(codec.encode(rows), rows.dtype)


class RoundingDispatcher(LocalDispatcher):
    """Rounds tokens and outputs as an exchange between ranks would, where one rank has all experts.

    A real exchange sums the outputs of a node's experts before it rounds them; here the sum of all is rounded once.
    """

    def __init__(self, dispatch_dtype: DispatchDtype) -> None:
        super().__init__()
        self._to_experts, self._back = (functools.partial(_rounded, codec) for codec in CODECS[dispatch_dtype])

    def __call__(
        self,
        tokens: Tensor,
        routing: Routing,
        experts: Experts,
        concurrent: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """See ``Dispatcher``."""
        rounded = custom_gradient(tokens, self._to_experts, self._back)
        output = super().__call__(rounded, routing, experts, concurrent)
        return custom_gradient(output, self._back, self._to_experts)


class MiniatureTrainer(Trainer):
    """The trainer, with the rounding of the exchange that one rank does not have."""

    def _build_engine(self) -> None:
        super()._build_engine()
        for module in self.engine.module.modules():
            if isinstance(module, MoELayer) and module.config.dispatch_dtype != "same":
                module.dispatcher = RoundingDispatcher(module.config.dispatch_dtype)


def document_of(case: Case, steps: int, data: Path, device: str) -> Document:
    """The JSON that a case trains."""
    small = miniature(changed(case.recipe, case.variant), case.recipe, steps, case.rate)
    small["m6"]["data"] |= {"path": str(data), "tokenizer": str(data / RECIPES[case.recipe].tokenizer)}
    small["m6"]["training"]["seed"] = case.seed
    small["m6"].setdefault("logging", {})["wandb"] = "off"
    if device == "cpu" and small.get("fp16", {}).get("enabled"):
        small["bf16"] = {"enabled": True}
        del small["fp16"]
    return small


def days(recipe: str, variant: str) -> float:
    """Days of the full size by its plan, kept in prices.json until the JSON of the recipe or the variant changes."""
    full = changed(recipe, variant)
    own = _digest(full)
    cluster, world = RECIPES[recipe].cluster, RECIPES[recipe].devices
    prices: dict[str, Any] = json.loads(PRICES.read_text(encoding="utf-8")) if PRICES.exists() else {}
    name = f"{recipe}, {variant}"
    known = prices.get(name)
    if known is not None and known["digest"] == own:
        return known["days"]
    planner = Planner(parse_config(full), load_cluster(Path(cluster)).scaled(world))
    stages = training_stages(planner)
    results = search_stages(stages)
    if not all(result.plans for result in results):
        raise UserError(f"{name}: no layout fits {world} devices of {cluster}")
    booked = [book_stage(stage, result.best, 24 * 60) for stage, result in zip(stages, results, strict=True)]
    price = round(sum(stage.steps * stage.step_s for stage in booked) / 86400, 4)
    prices[name] = {"digest": own, "cluster": cluster, "devices": world, "days": price}
    write_json(PRICES, dict(sorted(prices.items())))
    return price


def run_name(case: Case, steps: int, device: str) -> str:
    """Names what a case trains: equal miniatures of several recipes or variants are one run."""
    return _digest(document_of(case, steps, Path("data"), device))


def _digest(document: Document) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


def steps_of(case: Case, table: ResultTable) -> int | None:
    """Steps with which a case costs what the recipe's run costs, or more; None: a run that it needs is missing.

    A variant has up to 5 % more than its due, to the next power of ``GRID``.
    """
    if case.equal == "cost":
        ratio = days(case.recipe, "recipe") / days(case.recipe, case.variant)
    else:
        per_step: dict[str, float] = {}
        for row in table.rows():
            if row["recipe"] == case.recipe and row["equal"] == "cost":
                per_step[row["variant"]] = float(row["flops"]) / float(row["steps"])
        if not {"recipe", case.variant} <= per_step.keys():
            return None
        ratio = per_step["recipe"] / per_step[case.variant]
    if case.variant == "recipe":
        return case.base
    return max(20, round(case.base * GRID ** math.ceil(math.log(min(LONGEST, ratio), GRID) - 0.1)))


def run(case: Case, steps: int, data: Path, work: Path, runtime: Runtime) -> dict[str, Any]:
    """Trains a case, or goes on with it; returns its row."""
    folder = work / run_name(case, steps, runtime.device.type)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    write_json(file, document_of(case, steps, data, runtime.device.type))
    config = load_config(file)
    directory = RunDirectory(folder / "run")
    directory.open(config, runtime.world_size)
    trainer = MiniatureTrainer(config, directory, runtime)
    begin = time.process_time()
    if not trainer.train():
        raise SystemExit(f"stopped by a signal in {folder}")
    return {
        **asdict(case),
        "steps": steps,
        "run": folder.name,
        "device": device_name(runtime),
        "precision": config.deepspeed.precision,
        "digest": digest(case.recipe),
        "code": code_version(),
        # Days of the full size by its plan, if it is cut or made longer as the miniature is.
        "cost": f"{days(case.recipe, case.variant) * steps / case.base:.3f}",
        **summary(config, directory.read_metrics()),
        "cpu_s": round(time.process_time() - begin),
    }


def shared(case: Case, steps: int, name: str, table: ResultTable) -> dict[str, Any] | None:
    """The row of a case whose run was trained for another one."""
    for row in table.rows():
        if row["run"] == name:
            cost = f"{days(case.recipe, case.variant) * steps / case.base:.3f}"
            return {**row, **asdict(case), "digest": digest(case.recipe), "cost": cost, "cpu_s": "0"}
    return None


def device_name(runtime: Runtime) -> str:
    """ "cpu", or the GPU's name."""
    return torch.cuda.get_device_name() if runtime.device.type == "cuda" else "cpu"


def summary(config: RunConfig, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run: what was computed, and what was learned.

    Shares of tokens and pairs are means over the layers in the last tenth of the training steps.
    """
    training = [entry for entry in metrics if "loss" in entry]
    late = [entry["experts"] for entry in training[-max(1, len(training) // 10) :] if "experts" in entry]

    def mean(name: str) -> str:
        values = [value for entry in late for value in entry.get(name, ())]
        return f"{statistics.fmean(values):.4f}" if values else ""

    seconds = [entry["step_time_s"] for entry in training]
    flops = sum(entry["model_flops_per_second"] * entry["step_time_s"] for entry in training) / len(seconds)
    losses: dict[str, float] = next(entry["validation"] for entry in reversed(metrics) if "validation" in entry)
    curve = {
        entry["step"]: statistics.fmean(entry["validation"].values()) for entry in metrics if "validation" in entry
    }
    return {
        "tokens": training[-1]["tokens_seen"],
        "flops": f"{flops * config.m6.training.total_steps:.4g}",
        "tokens_without_expert": mean("tokens_without_expert"),
        "dropped_pairs": mean("dropped_fraction"),
        "experts_per_token": mean("experts_per_token"),
        "gate_sum": mean("gate_sum"),
        "loss": f"{statistics.fmean(losses.values()):.4f}",
        **{objective: f"{loss:.4f}" for objective, loss in losses.items()},
        "curve": " ".join(f"{step}:{loss:.3f}" for step, loss in curve.items()),
    }


def cases(arguments: argparse.Namespace, table: ResultTable) -> Iterator[Case]:
    """What is to be trained: first all variants at the JSON's rate, then at other rates, then with more seeds."""
    recipes, only, base = arguments.recipes or list(RECIPES), arguments.variants, arguments.steps
    chosen = [(recipe, name) for recipe in recipes for name in variants(recipe) if only is None or name in only]
    rates = (1.0,) if arguments.untuned else (1.0, *RATES)
    for rate in rates:
        for recipe, variant in chosen:
            yield Case(recipe, variant, "cost", rate, 0, base)
    for seed in range(arguments.seeds):
        for recipe, variant in chosen:
            best = 1.0 if arguments.untuned else best_rate(table, recipe, variant, base)
            for equal in arguments.equal:
                for rate in sorted({1.0, best}):
                    yield Case(recipe, variant, equal, rate, seed, base)


def best_rate(table: ResultTable, recipe: str, variant: str, base: int) -> float:
    """The rate whose run of seed 0 ended lowest."""
    ended = [
        (float(row["loss"]), float(row["rate"]))
        for row in table.rows()
        if tuple(row[name] for name in ("recipe", "variant", "equal", "seed", "base"))
        == (recipe, variant, "cost", "0", str(base))
    ]
    return min(ended, default=(0.0, 1.0))[1]


def train_all(arguments: argparse.Namespace) -> None:
    """Trains what is missing; several processes of this function share the work through locks of the runs' folders."""
    runtime, table = start(), ResultTable(RESULTS, KEY)
    arguments.work.mkdir(parents=True, exist_ok=True)
    for case in cases(arguments, table):
        steps = steps_of(case, table)
        key = {**asdict(case), "device": device_name(runtime)}
        if steps is None or table.holds(key):
            continue
        name = run_name(case, steps, runtime.device.type)
        with (arguments.work / f"{name}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # another process trains it
            if table.holds(key):
                continue
            row = shared(case, steps, name, table) or run(case, steps, arguments.data, arguments.work, runtime)
            with (arguments.work / "results.lock").open("w") as results:
                fcntl.flock(results, fcntl.LOCK_EX)
                table.append(row)
        print(f"{case}: {row['loss']} nats, {row['cpu_s']} CPU s", flush=True)


def measure_ngrams(arguments: argparse.Namespace) -> None:
    """Writes what n-gram models of the training text reach on the miniatures' validation rows, for each tokenizer."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    NGRAMS.unlink(missing_ok=True)
    table = ResultTable(NGRAMS, ("tokenizer", "objective", "model"))
    for recipe in {rule.tokenizer: recipe for recipe, rule in RECIPES.items()}.values():
        file = arguments.work / "ngrams.json"
        write_json(file, document_of(Case(recipe, "dense", "cost", 1.0, 0), STEPS, arguments.data, "cpu"))
        config = load_config(file)
        found = compute_baselines(config, open_data(config), config.m6.evaluation.num_rows)
        for objective, losses in found.items():
            for model, loss in losses.items():
                name = RECIPES[recipe].tokenizer
                table.append({"tokenizer": name, "objective": objective, "model": model, "loss": f"{loss:.4f}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"{', '.join(RECIPES)} (default: all), or ngrams")
    parser.add_argument("--variants", nargs="+", help="default: all of the recipe")
    parser.add_argument("--equal", nargs="+", choices=("cost", "flops"), default=("cost", "flops"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the recipe's run; the variants' follow from it")
    parser.add_argument("--untuned", action="store_true", help="the JSON's learning rates alone")
    parser.add_argument("--parallel", type=int, default=1, help="processes")
    parser.add_argument("--data", type=Path, default=Path("data/real"))
    parser.add_argument("--work", type=Path, default=Path("runs/large_recipes"))
    arguments = parser.parse_args()
    if arguments.recipes == ["ngrams"]:
        measure_ngrams(arguments)
        return
    unknown = [*(set(arguments.recipes) - RECIPES.keys())]
    if unknown:
        parser.error(f"unknown recipe {unknown[0]}; expected {', '.join(RECIPES)}")
    if arguments.parallel > 1:
        own = [argument for argument in sys.argv[1:]]
        at = own.index("--parallel")
        command = [sys.executable, "-m", "scripts.experiments.large_recipes.train", *own[:at], *own[at + 2 :]]
        processes = [subprocess.Popen(command) for _ in range(arguments.parallel)]
        sys.exit(max(process.wait() for process in processes))
    train_all(arguments)


if __name__ == "__main__":
    main()
