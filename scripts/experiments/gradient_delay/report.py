"""Reads results.csv; draws curves.png and prints the tables of the page.

python -m scripts.experiments.gradient_delay.report
"""

from __future__ import annotations

import csv
import statistics

from m6.formatting import markdown_table
from m6.plots.style import plotting, save_figure
from scripts.experiments.gradient_delay.train import FOLDER, OPTIMIZERS, RESULTS, WINDOW

CLOCK = 12.73 / 20.15
"""Seconds of a step of the Real stage of m6_10t.json with the delay, over those without, by configs/plans/m6_10t.md."""
_MEASURES = {"training": "training, last 50 steps", "language_modelling": "text", "image_captioning": "captions"}
_COLOURS = {"AdamW": "#000000", "Adafactor": "#0072B2", "Muon": "#D55E00"}

Key = tuple[str, float, int, int]
Rows = dict[Key, dict[str, str]]


def read() -> Rows:
    """Finished runs by optimizer, rate, delay and seed."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["optimizer"], float(row["rate"]), int(row["delay"]), int(row["seed"])): row for row in rows}


def seeds_of(rows: Rows, name: str, rate: float) -> list[int]:
    """The seeds that have a run with the delay and one without."""
    seeds = sorted({key[3] for key in rows})
    return [seed for seed in seeds if all((name, rate, delay, seed) in rows for delay in (0, 1))]


def curve(row: dict[str, str]) -> list[float]:
    """Mean training losses of consecutive windows."""
    return [float(value) for value in row["curve"].split()]


def loss_table(rows: Rows) -> str:
    """Losses with and without the delay, and what it adds to those of the same seed."""
    lines = []
    for name, (_, rates) in OPTIMIZERS.items():
        for rate in rates:
            seeds = seeds_of(rows, name, rate)
            for delay in (0, 1):
                losses = [[float(rows[name, rate, delay, seed][key]) for seed in seeds] for key in _MEASURES]
                added = [
                    float(rows[name, rate, 1, seed]["training"]) - float(rows[name, rate, 0, seed]["training"])
                    for seed in seeds
                ]
                more = _spread(added) if delay else ""
                lines.append([f"{name}, {rate:g}", "yes" if delay else "no", *map(_spread, losses), more, len(seeds)])
    header = ["optimizer, rate", "delay", *_MEASURES.values(), "added to training", "seeds"]
    return markdown_table(header, [list(map(str, line)) for line in lines], "llrrrrr")


def time_table(rows: Rows) -> str:
    """Steps to the loss that the run without the delay has after half of its steps, and time by the clock of a plan."""
    lines = []
    for name, (_, rates) in OPTIMIZERS.items():
        ratios = []
        for seed in seeds_of(rows, name, rates[0]):
            base, late = (curve(rows[name, rates[0], delay, seed]) for delay in (0, 1))
            target = min(base[: len(base) // 2])
            first, reached = (next(n for n, loss in enumerate(each, 1) if loss <= target) for each in (base, late))
            ratios.append(reached / first)
        lines.append([f"{name}, {rates[0]:g}", _spread(ratios, 2), _spread([CLOCK * ratio for ratio in ratios], 2)])
    return markdown_table(["optimizer, rate", "steps", "time by the plan of the 10T Real stage"], lines, "lrr")


def draw(rows: Rows) -> None:
    """Mean training losses over steps, with and without the delay, at the first rates."""
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(figsize=(5.5, 3.4), layout="constrained")
        for name, (_, rates) in OPTIMIZERS.items():
            for delay in (0, 1):
                found = [curve(rows[name, rates[0], delay, seed]) for seed in seeds_of(rows, name, rates[0])]
                loss = [statistics.mean(values) for values in zip(*found, strict=True)]
                steps = [WINDOW * (number + 1) for number in range(len(loss))]
                label = f"{name}, one step late" if delay else name
                axes.plot(steps, loss, "--" if delay else "-", color=_COLOURS[name], label=label, linewidth=1.1)
        axes.set(xlabel="step", ylabel="training loss, nats a target", ylim=(2.5, 4.5))
        axes.legend(frameon=False)
        save_figure(figure, FOLDER / "curves.png")


def _spread(values: list[float], digits: int = 3) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else mean


if __name__ == "__main__":
    results = read()
    draw(results)
    print(loss_table(results), time_table(results), sep="\n\n")
