"""Reads results.csv; draws curves.png and prints the tables of the page.

python scripts/experiments/pseudo_to_real/report.py
"""

from __future__ import annotations

import copy
import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m6.formatting import markdown_table

HERE = Path(__file__).parent
RATIOS = (1, 2, 4.4, 5, 10, 20, math.inf)
"""What a Real step costs in Pseudo steps: 1 is setting (a), the others are setting (b); 4.4 is the plan of m6_10t."""
PLANNED_RATIO = 4.4
DRAWN_RATIO = 10
SEEDS = (0, 1, 2)
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")


class Run:
    """One run's validation losses, and what its steps cost."""

    def __init__(self, rows: Sequence[dict[str, str]]) -> None:
        self.name, self.seed = rows[0]["run"], int(rows[0]["seed"])
        self.recipe, _, self.change = self.name.rpartition(": ")
        self.steps = [int(row["step"]) for row in rows]
        self.losses = [float(row["validation_loss"]) for row in rows]
        self.switch = max((int(row["switch_step"]) for row in rows if row["switch_step"]), default=0)
        self.step_cpu_s = {s: float(rows[0][f"{s}_step_cpu_s"] or "nan") for s in ("pseudo", "real")}

    def cost(self, step: float, ratio: float) -> float:
        """What ``step`` steps cost, in Pseudo steps; in Real steps if one costs infinitely many Pseudo steps."""
        pseudo, real = min(step, self.switch), max(0.0, step - self.switch)
        return real if math.isinf(ratio) else pseudo + ratio * real

    def before_switch(self) -> Run:
        """The run up to its switch, as one that never switches."""
        own = copy.copy(self)
        number = sum(step <= self.switch for step in self.steps)
        own.steps, own.losses = self.steps[:number], self.losses[:number]
        return own

    def step_at(self, loss: float) -> float:
        """The first step at which the loss is ``loss``, between two validations by a straight line; or infinity."""
        for index, (step, value) in enumerate(zip(self.steps, self.losses, strict=True)):
            if value <= loss:
                if index == 0:
                    return float(step)
                before, step_before = self.losses[index - 1], self.steps[index - 1]
                return step_before + (step - step_before) * (before - loss) / (before - value)
        return math.inf


def read_runs() -> list[Run]:
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    with (HERE / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault((row["run"], row["seed"]), []).append(row)
    return [Run(rows) for rows in groups.values()]


def speed_up(run: Run, real: Run, ratio: float) -> float:
    """By how much sooner than Real from scratch the run reaches the higher of both final losses."""
    loss = max(run.losses[-1], real.losses[-1])
    own = run.cost(run.step_at(loss), ratio)
    reference = real.cost(real.step_at(loss), ratio)
    return reference / own if own else math.inf


def table(runs: list[Run]) -> str:
    real = {(run.recipe, run.seed): run for run in runs if run.change == "real"}
    names = list(dict.fromkeys(run.name for run in runs))
    header = ["run", "seeds", "switch", "final loss"] + [f"r = {'∞' if math.isinf(r) else r}" for r in RATIOS]
    lines = []
    for name in names:
        own = [run for run in runs if run.name == name]
        cells = [name, str(len(own)), "/".join(str(run.switch) for run in own), spread([r.losses[-1] for r in own], 3)]
        cells += [spread([speed_up(run, real[run.recipe, run.seed], ratio) for run in own], 2) for ratio in RATIOS]
        lines.append(cells)
    return markdown_table(header, lines)


def never_switching(runs: list[Run]) -> str:
    """The losses of each seed beside what the steps cost at the plan's ratio, of Pseudo alone first."""
    lines = []
    for recipe, title in (("recipe", "the recipe"), ("", "AdamW, cosine")):
        own = [run for run in runs if run.recipe == recipe]
        groups = {"long Pseudo, before its switch": [r.before_switch() for r in own if r.change == "long Pseudo"]}
        for change in ("Pseudo alone", "switch 50 %", "switch 75 %", "long Pseudo", "short Real", "real"):
            groups[change] = [run for run in own if run.change == change]
        for name, members in groups.items():
            if members:
                last = members[0].steps[-1]
                pseudo = min(last, members[0].switch)
                losses = {run.seed: f"{run.losses[-1]:.3f}" for run in members}
                cost = f"{members[0].cost(last, PLANNED_RATIO):,.0f}"
                lines.append([title, name, str(pseudo), str(last - pseudo), cost, *(losses.get(s, "") for s in SEEDS)])
    header = ["", "run", "Pseudo steps", "Real steps", f"cost at r = {PLANNED_RATIO}", *(f"seed {s}" for s in SEEDS)]
    return markdown_table(header, lines, align="llrrrrrr")


def spread(values: list[float], digits: int) -> str:
    """The median, with least and most where there are several."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def step_times(runs: list[Run]) -> str:
    """Pseudo over Real steps in CPU seconds, from the runs that made both."""
    both = [run for run in runs if run.switch and run.change != "Pseudo alone"]  # whose one Real step is its first
    ratios = [run.step_cpu_s["pseudo"] / run.step_cpu_s["real"] for run in both]
    return f"Pseudo step / Real step, all in memory: {spread(ratios, 3)}"


def draw(runs: list[Run]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, 3, figsize=(17, 10), layout="constrained")
    for panels, recipe, title in zip(rows, ("", "recipe"), ("AdamW", "the recipe"), strict=True):
        _draw_row(panels, [run for run in runs if run.recipe == recipe], title)
    figure.suptitle("Pseudo-to-Real against Real from scratch (dotted: the switch)")
    figure.savefig(HERE / "curves.png", dpi=110)


def _draw_row(panels: Sequence[Any], runs: list[Run], title: str) -> None:
    """Against steps all runs, one seed of those that are not compared; against the cost those that are."""
    colours = {name: _COLOURS[index] for index, name in enumerate(("real", "switch 50 %", "long Pseudo"))}
    for run in runs:
        if run.change in colours:
            label = run.change if run.seed == 0 else None
            for axes, ratio in zip(panels, (None, 1, DRAWN_RATIO), strict=True):
                times = [step if ratio is None else run.cost(step, ratio) for step in run.steps]
                axes.plot(times, run.losses, color=colours[run.change], label=label, linewidth=1.4)
                if run.switch:
                    at = run.switch if ratio is None else run.cost(run.switch, ratio)
                    axes.axvline(at, color=colours[run.change], linestyle="dotted", linewidth=1)
    others = [run for run in runs if run.seed == 0 and run.change not in colours]
    for index, run in enumerate(others):
        panels[0].plot(run.steps, run.losses, linewidth=0.8, alpha=0.8, color=_COLOURS[index % len(_COLOURS)],
                       linestyle=("dashed", "dashdot")[index // len(_COLOURS)], label=run.change)  # fmt: skip
    lowest = min(min(run.losses) for run in runs)
    axis_titles = ("steps", "cost in steps, all in memory (a)",
                   f"cost in Pseudo steps, a Real step costing {DRAWN_RATIO} (b)")  # fmt: skip
    for axes, axis_title in zip(panels, axis_titles, strict=True):
        axes.set_xlabel(axis_title)
        axes.set_ylim(lowest - 0.05, lowest + 1.05)
        axes.grid(alpha=0.25)
    panels[0].set_title(title)
    panels[0].set_ylabel("validation loss, nats per target, mean of four objectives")
    panels[0].legend(fontsize=8)


def main() -> None:
    runs = read_runs()
    print(never_switching(runs), table(runs), step_times(runs), sep="\n\n")
    draw(runs)


if __name__ == "__main__":
    main()
