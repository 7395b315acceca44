"""Prints the tables of README.md from results.csv, ngrams.csv and speed.csv, and draws results.png:

python -m scripts.experiments.prototyping.report [--recipe]

With --recipe it prints those of results_recipe.csv alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from m6.files import atomic_path
from m6.formatting import markdown_table
from scripts.experiments.experiment import ResultTable
from scripts.experiments.prototyping.grid import (
    FOLDER,
    NGRAMS,
    RECIPE_RESULTS,
    RESULTS,
    RETIRED,
    ROUTINGS,
    SPEED,
    Case,
    cases,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = dict[int, float]
# Okabe and Ito's palette, which people with any colour vision can tell apart.
_COLOURS = {
    "top-1": "#5a5a5a",
    "top-2": "#56B4E9",
    "top-4": "#0072B2",
    "2 top-1": "#E69F00",
    "4 top-1": "#D55E00",
}
BASE = Case("top-1", "k", True)
_MARKERS = {"k": "o", "1": "s", "none": "^"}
# title: (what is changed, what it is changed from)
PAIRS: dict[str, list[tuple[Case, Case]]] = {
    "more experts a token, capacity k": [
        (Case(routing, "k", balanced), Case("top-1", "k", balanced))
        for routing in ("top-2", "top-4", "2 top-1", "4 top-1")
        for balanced in (True, False)
    ],
    "more experts a token, capacity 1": [
        (Case(routing, "1", balanced), Case("top-1", "k", balanced))
        for routing in ("top-2", "top-4", "2 top-1", "4 top-1")
        for balanced in (True, False)
    ],
    "k top-1 instead of top-k": [
        (Case(f"{k} top-1", capacity, balanced), Case(f"top-{k}", capacity, balanced))
        for k in (2, 4)
        for capacity in ("k", "1")
        for balanced in (True, False)
    ],
    "normalized gates instead of the softmax's own": [
        (Case(f"normalized {routing}", "k", True), Case(routing, "k", True))
        for routing in ("top-2", "top-4", "2 top-1", "4 top-1")
    ],
    "k top-1 instead of top-k with normalized gates": [
        (Case(f"{ours}{k} top-1", "k", True), Case(f"normalized top-{k}", "k", True))
        for k in (2, 4)
        for ours in ("", "normalized ")
    ],
    "without the balancing loss instead of with it": [
        (changed, case)
        for case in cases()
        if case.balanced and (changed := dataclasses.replace(case, balanced=False)) in cases()
    ],
    "experts on the attention projections too": [
        (case, dataclasses.replace(case, moe_attention=False)) for case in RETIRED
    ],
}


class Results:
    """The columns of a CSV of results by case and seed."""

    def __init__(self, path: Path) -> None:
        self._rows = ResultTable(path, ()).rows()
        self._speed = ResultTable(SPEED, ()).rows() if path == RESULTS else []  # with the optimizer of those runs

    def values(self, case: Case, column: str) -> Values:
        return {int(row["seed"]): float(row[column]) for row in self._rows if _is(row, case)}

    def speed(self, case: Case) -> str:
        for row in self._speed:
            if _is(row, case):
                middle, low, high = (float(row[column]) for column in ("ms", "ms_10", "ms_90"))
                return f"{middle:.0f} ({low:.0f} to {high:.0f})"
        return "-"

    def mean(self, case: Case, column: str) -> float:
        return float(np.mean(list(self.values(case, column).values())))

    def steps_to_base(self, case: Case) -> list[float]:
        """For every seed, the step at which training is at the loss with which ``BASE`` ends; inf where it never is."""
        steps = self.values(case, "steps")
        losses, base = self._training_losses(case), self._training_losses(BASE)
        return [first_step(losses[seed], base[seed][-1], steps[seed]) for seed in sorted(steps.keys() & base.keys())]

    def _training_losses(self, case: Case) -> dict[int, list[float]]:
        rows = [row for row in self._rows if _is(row, case)]
        return {int(row["seed"]): [float(loss) for loss in row["training_losses"].split()] for row in rows}

    def difference(self, changed: Case, base: Case) -> list[float]:
        """Of the validation loss of language modelling, for every seed that both have."""
        left, right = self.values(changed, "validation_lm"), self.values(base, "validation_lm")
        return [left[seed] - right[seed] for seed in sorted(left.keys() & right.keys())]


def first_step(losses: Sequence[float], target: float, steps: float) -> float:
    """Where a curve first comes down to ``target``: it is straight between the ends of its equal parts."""
    per_part = steps / len(losses)
    for part, (before, after) in enumerate(itertools.pairwise(losses), start=1):
        if after <= target:
            return per_part * (part + (before - target) / (before - after))
    return math.inf


def _is(row: dict[str, str], case: Case) -> bool:
    return all(row[name] == value for name, value in case.identity().items())


def name(case: Case) -> str:
    capacity = "no capacity" if case.capacity == "none" else f"capacity {case.capacity}"
    attention = ", MoE attention" if case.moe_attention else ""
    return f"{case.routing}, {capacity}{'' if case.balanced else ', no balancing'}{attention}"


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and in brackets the standard deviation between seeds."""
    deviation = f" ({np.std(values, ddof=1):{form.lstrip('+')}})" if len(values) > 1 else ""
    return f"{np.mean(values):{form}}{deviation}"


def main_table(results: Results) -> str:
    header = [
        "routing", "seeds", "language modelling", "captions", "MFLOP/token", "ms/step", "load c_v", "dropped",
        "steps to top-1",
    ]  # fmt: skip
    lines = []
    for case in (*cases(), *RETIRED):
        losses = list(results.values(case, "validation_lm").values())
        if losses:
            lines.append(
                [
                    name(case),
                    str(len(losses)),
                    spread(losses, ".3f"),
                    spread(list(results.values(case, "validation_captions").values()), ".2f"),
                    f"{results.mean(case, 'flops_per_token') / 1e6:.2f}",
                    results.speed(case),
                    f"{results.mean(case, 'load_cv'):.2f}",
                    f"{results.mean(case, 'dropped'):.1%}",
                    _steps(results.steps_to_base(case)),
                ]
            )
    return markdown_table(header, lines)


def _steps(steps: Sequence[float]) -> str:
    """The median, and in brackets the least and the most."""
    if math.isinf(min(steps)):
        return "never"
    figures = (min(steps), statistics.median(steps), max(steps))
    low, middle, high = ("never" if math.isinf(step) else f"{step:.0f}" for step in figures)
    return f"{middle} ({low} to {high})"


def ngram_table() -> str:
    rows = [[row["objective"], row["model"], f"{float(row['loss']):.3f}"] for row in ResultTable(NGRAMS, ()).rows()]
    return markdown_table(["objective", "model", "nats per byte"], rows)


def pair_tables(results: Results) -> str:
    parts = []
    for title, pairs in PAIRS.items():
        lines = [f"| {title} | from | mean (deviation) | each seed |", "| --- | --- | ---: | ---: |"]
        for changed, base in pairs:
            if differences := results.difference(changed, base):
                each = ", ".join(f"{value:+.3f}" for value in differences)
                lines.append(f"| {name(changed)} | {name(base)} | {spread(differences, '+.3f')} | {each} |")
        if len(lines) > 2:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def draw(results: Results) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
    _draw_against(left, results, "flops_per_token", 1e-6)
    left.set_xlabel("MFLOP per token, forward and backward, output matrix left out")
    _draw_against(middle, results, "load_cv")
    middle.set_xlabel("c_v of the experts' load, after dropping")
    _draw_against(right, results, "dropped", 100.0)
    right.set_xlabel("choices that found their expert full, %")
    left.set_ylabel("validation loss of language modelling, nats per byte")
    handles = [pyplot.Line2D([], [], color=colour, marker="o", ls="") for colour in _COLOURS.values()]
    shapes = {"capacity k": "o", "capacity 1": "s", "no capacity": "^", "normalized gates": "D", "MoE attention": "*"}
    handles += [pyplot.Line2D([], [], color="black", marker=marker, ls="") for marker in shapes.values()]
    handles.append(pyplot.Line2D([], [], color="black", marker="o", mfc="white", ls=""))
    handles.append(pyplot.Line2D([], [], color="#5a5a5a", lw=1, ls="--"))
    labels = [*_COLOURS, *shapes, "no balancing loss", "bigram model"]
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    with atomic_path(FOLDER / "results.png") as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    pyplot.close(figure)


def _draw_against(axes: Axes, results: Results, column: str, scale: float = 1.0) -> None:
    """Every configuration at its mean, with the range over seeds, and the bigram model's loss as a line."""
    (bigram,) = (
        float(row["loss"])
        for row in ResultTable(NGRAMS, ()).rows()
        if (row["objective"], row["model"]) == ("language_modelling", "bigram")
    )
    for case in (*cases(), *RETIRED):
        losses = list(results.values(case, "validation_lm").values())
        if not losses:
            continue
        mean, colour = float(np.mean(losses)), _COLOURS[case.routing.removeprefix("normalized ")]
        axes.errorbar(
            results.mean(case, column) * scale,
            mean,
            yerr=[[mean - min(losses)], [max(losses) - mean]],
            marker=_marker(case),
            ms=11 if case.moe_attention else 7,
            color=colour,
            mfc=colour if case.balanced else "white",
            elinewidth=1,
        )
    axes.axhline(bigram, color="#5a5a5a", lw=1, ls="--")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _marker(case: Case) -> str:
    if case.moe_attention:
        return "*"
    return "D" if ROUTINGS[case.routing].normalized else _MARKERS[case.capacity]


def main() -> None:
    if "--recipe" in sys.argv[1:]:
        results = Results(RECIPE_RESULTS)
        print(main_table(results), pair_tables(results), sep="\n\n")
        return
    results = Results(RESULTS)
    print(main_table(results), ngram_table(), pair_tables(results), sep="\n\n")
    draw(results)


if __name__ == "__main__":
    main()
