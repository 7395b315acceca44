"""Prints the tables of results.csv, with a verdict for each: ``python -m scripts.experiments.large_recipes.report``.

A recipe stays if it ends below the dense model and below top-1 at equal cost, in every seed that both have.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from m6.formatting import markdown_table
from scripts.experiments.experiment import ResultTable
from scripts.experiments.large_recipes.miniature import RECIPES, digest, variants
from scripts.experiments.large_recipes.train import KEY, NGRAMS, RESULTS

Row = dict[str, str]
PEERS = ("dense", "top1")
HEADER = (
    "variant",
    "seeds",
    "rate",
    "steps",
    "cost in planned days",
    "TFLOP computed",
    "tokens without an expert",
    "pairs dropped",
    "loss",
    "language modelling",
)


class Comparison(NamedTuple):
    """The recipe's loss minus a variant's, in each seed that both have."""

    variant: str
    differences: list[float]

    @property
    def wins(self) -> bool:
        """Whether the recipe is lower in every seed."""
        return bool(self.differences) and max(self.differences) < 0


def current(rows: list[Row]) -> list[Row]:
    """The rows of the configurations as they are shipped today; those of older ones are not evidence for them."""
    digests = {recipe: digest(recipe) for recipe in RECIPES}
    return [row for row in rows if row["digest"] == digests[row["recipe"]]]


def at_best_rate(rows: list[Row]) -> dict[str, list[Row]]:
    """variant -> its runs at the rate whose mean loss is lowest, of those rates that most seeds have."""
    by_rate: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_rate[row["variant"]][row["rate"]].append(row)

    def rank(runs: list[Row]) -> tuple[int, float]:
        return -len(runs), statistics.fmean(float(run["loss"]) for run in runs)

    return {variant: min(rates.values(), key=rank) for variant, rates in by_rate.items()}


def compare(chosen: dict[str, list[Row]], variant: str) -> Comparison:
    """The recipe against a variant, within seeds."""
    losses = {name: {run["seed"]: float(run["loss"]) for run in chosen.get(name, ())} for name in ("recipe", variant)}
    seeds = sorted(losses["recipe"].keys() & losses[variant].keys())
    return Comparison(variant, [losses["recipe"][seed] - losses[variant][seed] for seed in seeds])


def verdict(recipe: str, chosen: dict[str, list[Row]]) -> str:
    """One line: whether the recipe stays, loses or is undecided, and by what."""
    found = [compare(chosen, peer) for peer in PEERS if peer in variants(recipe)]
    said = ", ".join(
        f"{peer.variant} {statistics.fmean(peer.differences):+.3f} ({len(peer.differences)} seeds)"
        if peer.differences
        else f"{peer.variant} not trained"
        for peer in found
    )
    if any(peer.differences and not peer.wins for peer in found):
        outcome = "does not win"
    elif all(len(peer.differences) >= 3 and peer.wins for peer in found):
        outcome = "stays"
    else:
        outcome = "is undecided"
    return f"**{recipe} {outcome}**: the recipe's loss minus that of {said}."


def table(recipe: str, rows: list[Row]) -> str:
    """The runs of a recipe, a line for each variant."""
    chosen = at_best_rate(rows)
    lines = []
    for variant in [name for name in variants(recipe) if name in chosen]:
        runs = chosen[variant]

        def mean(name: str, runs: list[Row] = runs) -> float | None:
            values = [float(run[name]) for run in runs if run[name]]
            return statistics.fmean(values) if values else None

        def share(value: float | None) -> str:
            return "" if value is None else f"{value:.1%}"

        losses = [float(run["loss"]) for run in runs]
        spread = f" ({statistics.stdev(losses):.3f})" if len(losses) > 1 else ""
        lines.append(
            [
                variant,
                str(len(runs)),
                runs[0]["rate"],
                runs[0]["steps"],
                f"{mean('cost'):.2f}",
                f"{mean('flops') / 1e12:.1f}",  # type: ignore[operator]
                share(mean("tokens_without_expert")),
                share(mean("dropped_pairs")),
                f"{statistics.fmean(losses):.3f}{spread}",
                f"{mean('language_modelling'):.3f}",
            ]
        )
    return markdown_table(HEADER, lines)


def report(rows: list[Row]) -> str:
    """All tables: at the JSON's learning rate and at the best one, at equal cost and at equal FLOPs."""
    said = []
    for recipe in RECIPES:
        own = [row for row in rows if row["recipe"] == recipe]
        if not own:
            continue
        longest = max(int(row["base"]) for row in own)
        own = [row for row in own if int(row["base"]) == longest]
        said.append(f"## {recipe}")
        for equal in ("cost", "flops"):
            at_json = [row for row in own if row["equal"] == equal and float(row["rate"]) == 1]
            every = [row for row in own if row["equal"] == equal]
            if at_json:
                said += [f"At equal {equal}, at the JSON's learning rate:", table(recipe, at_json)]
                said.append(verdict(recipe, at_best_rate(at_json)))
            if len(every) > len(at_json):
                said += [f"At equal {equal}, each at its best learning rate:", table(recipe, every)]
                said.append(verdict(recipe, at_best_rate(every)))
    return "\n\n".join(said)


def ngrams(file: Path = NGRAMS) -> str:
    """What n-gram models reach on the same rows."""
    if not file.exists():
        return ""
    with file.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    return markdown_table(tuple(rows[0]), [list(row.values()) for row in rows])


if __name__ == "__main__":
    print(report(current(ResultTable(RESULTS, KEY).rows())), ngrams(), sep="\n\n")
