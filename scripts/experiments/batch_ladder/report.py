"""Reads results_*.csv; draws ladder.png and prints the tables of the page.

python -m scripts.experiments.batch_ladder.report
"""

from __future__ import annotations

import csv
import statistics

import numpy as np

from m6.formatting import markdown_table
from m6.plots.style import plotting, save_figure
from scripts.experiments.batch_ladder.train import BATCHES, FOLDER

_COLOURS = {"AdamW": "#000000", "Lamb": "#D55E00"}

Rows = dict[tuple[int, int], dict[str, str]]


def read(optimizer: str) -> Rows:
    """Finished runs by batch and seed, of the seeds that have every batch."""
    with (FOLDER / f"results_{optimizer}.csv").open(encoding="utf-8", newline="") as file:
        rows = {(int(row["batch"]), int(row["seed"])): row for row in csv.DictReader(file)}
    seeds = {seed for _, seed in rows}
    whole = {seed for seed in seeds if all((batch, seed) in rows for batch in BATCHES[optimizer])}
    return {key: row for key, row in rows.items() if key[1] in whole}


def seeds_of(rows: Rows) -> list[int]:
    return sorted({seed for _, seed in rows})


def fitted(rows: Rows, seed: int) -> tuple[float, float]:
    """The fewest steps and the critical batch: steps = fewest (1 + critical / batch) (arXiv 1812.06162, equation 2.11),
    by least squares on the relative error."""
    batches = sorted(batch for batch, of_seed in rows if of_seed == seed)
    steps = np.array([float(rows[batch, seed]["steps"]) for batch in batches])
    design = np.stack([np.ones(len(batches)), 1 / np.array(batches)], axis=1) / steps[:, None]
    fewest, product = np.linalg.lstsq(design, np.ones(len(batches)), rcond=None)[0]
    return float(fewest), float(product / fewest)


def table(optimizer: str, rows: Rows) -> str:
    """Steps, samples and the noise scale: mean and standard deviation over seeds."""
    lines = []
    for batch in BATCHES[optimizer]:
        found = [rows[batch, seed] for seed in seeds_of(rows)]
        steps = [float(row["steps"]) for row in found]
        scales = [float(row["noise_scale"]) for row in found if row["noise_scale"]]
        samples = f"{batch * statistics.mean(steps):,.0f}"
        lines.append([str(batch), found[0]["lr"], _spread(steps), samples, _spread(scales) if scales else ""])
    return markdown_table(["batch", "rate", "steps", "samples", "noise scale, samples"], lines, "rrrrr")


def draw(results: dict[str, Rows]) -> None:
    """Steps to the target over the batch, with the fitted curve of AdamW."""
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(figsize=(5, 3.4), layout="constrained")
        for optimizer, rows in results.items():
            for batch, seed in rows:
                label = optimizer if (batch, seed) == next(iter(rows)) else None
                steps = float(rows[batch, seed]["steps"])
                axes.plot(batch, steps, "o", markersize=3, color=_COLOURS[optimizer], label=label)
        fits = [fitted(results["AdamW"], seed) for seed in seeds_of(results["AdamW"])]
        fewest, critical = (statistics.mean(values) for values in zip(*fits, strict=True))
        grid = np.geomspace(6, 160, 50)
        axes.plot(grid, fewest * (1 + critical / grid), color=_COLOURS["AdamW"], linewidth=0.9)
        axes.set(xscale="log", yscale="log", xlabel="batch, samples", ylabel="steps to the target")
        axes.set_xticks(BATCHES["AdamW"], [str(batch) for batch in BATCHES["AdamW"]])
        axes.set_yticks([30, 50, 100], ["30", "50", "100"])
        axes.minorticks_off()
        axes.legend(frameon=False)
        save_figure(figure, FOLDER / "ladder.png")


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f} ({statistics.stdev(values):.1f})" if len(values) > 1 else f"{values[0]:.1f}"


if __name__ == "__main__":
    all_rows = {optimizer: read(optimizer) for optimizer in BATCHES}
    draw(all_rows)
    for name, of_optimizer in all_rows.items():
        print(name, seeds_of(of_optimizer), table(name, of_optimizer), sep="\n\n")
    for number in seeds_of(all_rows["AdamW"]):
        print(f"seed {number}: %.1f steps at least, critical batch %.1f" % fitted(all_rows["AdamW"], number))
