"""Reads results.csv; draws curves.png and prints the tables of the page.

python -m scripts.experiments.payload.report
"""

from __future__ import annotations

import csv
import statistics

from m6.formatting import markdown_table
from m6.plots.style import plotting, save_figure
from scripts.experiments.payload.train import FOLDER, PAYLOADS, RESULTS, WINDOW

BASE = "bfloat16"
MEASURES = {"training": "training, last 50 steps", "language_modelling": "text", "image_captioning": "captions"}
_COLOURS = {"same": "#999999", "bfloat16": "#000000", "float8": "#0072B2", "float8_both": "#D55E00"}

Rows = dict[tuple[str, int], dict[str, str]]


def read() -> Rows:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {(row["payload"], int(row["seed"])): row for row in csv.DictReader(file)}


def curve(row: dict[str, str]) -> list[float]:
    """Mean training losses of consecutive windows."""
    return [float(value) for value in row["curve"].split()]


def tables(rows: Rows) -> str:
    """Losses, and differences to 16 bits within a seed: mean and standard deviation over seeds."""
    seeds = sorted({seed for _, seed in rows})
    losses, differences = [], []
    for payload in PAYLOADS:
        values = {name: [float(rows[payload, seed][name]) for seed in seeds] for name in MEASURES}
        losses.append([payload, *(_spread(each, "") for each in values.values())])
        if payload != BASE:
            apart = {
                name: [value - float(rows[BASE, seed][name]) for seed, value in zip(seeds, each, strict=True)]
                for name, each in values.items()
            }
            each_seed = ", ".join(f"{value:+.3f}" for value in apart["training"])
            differences.append([payload, *(_spread(each, "+") for each in apart.values()), each_seed])
    header = ["payload", *MEASURES.values()]
    return "\n\n".join(
        [
            markdown_table(header, losses, "lrrr"),
            markdown_table([*header, "training, each seed"], differences, "lrrrr"),
        ]
    )


def draw(rows: Rows) -> None:
    """Training losses, and their differences to 16 bits for each seed."""
    seeds = sorted({seed for _, seed in rows})
    with plotting() as pyplot:
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for payload in PAYLOADS:
            curves = [curve(rows[payload, seed]) for seed in seeds]
            steps = [WINDOW * (number + 1) for number in range(len(curves[0]))]
            mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
            left.plot(steps, mean, color=_COLOURS[payload], label=payload, linewidth=1.2)
            for seed, values in zip(seeds, curves, strict=True):
                apart = [value - base for value, base in zip(values, curve(rows[BASE, seed]), strict=True)]
                right.plot(steps, apart, color=_COLOURS[payload], linewidth=0.9, alpha=0.8)
        left.set(title="Training loss, mean over seeds", xlabel="step", ylabel="nats a target")
        right.set(title="Minus bfloat16, each seed", xlabel="step")
        left.legend(frameon=False)
        save_figure(figure, FOLDER / "curves.png")


def _spread(values: list[float], sign: str) -> str:
    return f"{statistics.mean(values):{sign}.3f} ({statistics.stdev(values):.3f})"


if __name__ == "__main__":
    found = read()
    draw(found)
    print(tables(found))
