"""Reads results.csv; draws curves.png and prints the tables of the page.

python -m scripts.experiments.gradient_bytes.report
"""

from __future__ import annotations

import csv
import itertools
import statistics

from matplotlib.ticker import NullFormatter

from m6.formatting import markdown_table
from m6.plots.style import plotting, save_figure
from scripts.experiments.gradient_bytes.train import FOLDER, REDUCERS, RESULTS, WINDOW

NETWORKS = {"1 Gb/s": 1.25e8, "10 Gb/s": 1.25e9, "100 Gb/s": 1.25e10}
TOKENS, FLOPS = 8192, 50e12
"""The simulated rank computes so many tokens a step, at this rate."""
_MEASURES = {"training": "training, last 50 steps", "language_modelling": "text", "image_captioning": "captions"}
_COLOURS = dict(zip(REDUCERS, ("#000000", "#56B4E9", "#0072B2", "#D55E00", "#009E73"), strict=True))

Rows = dict[tuple[str, int], dict[str, str]]


def read() -> Rows:
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {(row["reducer"], int(row["seed"])): row for row in csv.DictReader(file)}


def curve(row: dict[str, str]) -> list[float]:
    """Mean training losses of consecutive windows."""
    return [float(value) for value in row["curve"].split()]


def sent(row: dict[str, str]) -> list[float]:
    """Mean bytes that a rank sent in a step, of the same windows."""
    return [float(value) for value in row["bytes"].split()]


def times(row: dict[str, str], bytes_per_s: float) -> list[float]:
    """Seconds at the end of each window: 6 FLOPs for each parameter and token, then the bytes, nothing at once."""
    compute = 6 * float(row["parameters"]) * TOKENS / FLOPS
    return list(itertools.accumulate(WINDOW * (compute + each / bytes_per_s) for each in sent(row)))


def window_of(row: dict[str, str], target: float) -> int | None:
    """The first window whose loss is at most the target."""
    return next((number for number, loss in enumerate(curve(row)) if loss <= target), None)


def loss_table(rows: Rows, seeds: list[int]) -> str:
    """Losses and bytes after all steps: mean and standard deviation over seeds."""
    lines = []
    for reducer in REDUCERS:
        values = [_spread([float(rows[reducer, seed][name]) for seed in seeds]) for name in _MEASURES]
        late = [sent(rows[reducer, seed])[-1] for seed in seeds]
        whole = [sent(rows["all_reduce", seed])[-1] for seed in seeds]
        share = statistics.mean(late) / statistics.mean(whole)
        lines.append([reducer, *values, f"{statistics.mean(late) / 1e3:,.0f}", f"{share:.1%}"])
    return markdown_table(["reducer", *_MEASURES.values(), "kB a step and rank", "of all_reduce"], lines, "lrrrrr")


def time_table(rows: Rows, seeds: list[int]) -> str:
    """Steps, bytes and simulated time to the loss that all_reduce has at half of its steps, against all_reduce."""
    lines = []
    for reducer in REDUCERS:
        ratios: dict[str, list[float]] = {name: [] for name in ("steps", "bytes", *NETWORKS)}
        for seed in seeds:
            base, row = rows["all_reduce", seed], rows[reducer, seed]
            half = len(curve(base)) // 2
            target = curve(base)[half - 1]
            first, reference = window_of(row, target), window_of(base, target)
            if first is None or reference is None:
                continue
            ratios["steps"].append((first + 1) / (reference + 1))
            ratios["bytes"].append(sum(sent(row)[: first + 1]) / sum(sent(base)[: reference + 1]))
            for name, rate in NETWORKS.items():
                ratios[name].append(times(row, rate)[first] / times(base, rate)[reference])
        if len(ratios["steps"]) < len(seeds):
            lines.append([reducer, *["not reached"] * len(ratios)])
        else:
            lines.append([reducer, *(_spread(values, 2) for values in ratios.values())])
    return markdown_table(["reducer", "steps", "bytes", *NETWORKS], lines, "lrrrrr")


def draw(rows: Rows, seeds: list[int]) -> None:
    """Mean training losses over steps, over bytes, and over simulated time on each network."""
    with plotting() as pyplot:
        figure, panels = pyplot.subplots(1, 5, figsize=(15, 3.2), layout="constrained", sharey=True)
        for reducer in REDUCERS:
            found = [rows[reducer, seed] for seed in seeds]
            loss = [statistics.mean(values) for values in zip(*map(curve, found), strict=True)]
            row = found[0]
            steps = [float(WINDOW * (number + 1)) for number in range(len(loss))]
            megabytes = [total * WINDOW / 1e6 for total in itertools.accumulate(sent(row))]
            axes = [steps, megabytes, *(times(row, rate) for rate in NETWORKS.values())]
            for panel, values in zip(panels, axes, strict=True):
                panel.plot(values, loss, color=_COLOURS[reducer], label=reducer, linewidth=1.2)
        names = ["step", "MB that a rank has sent", *(f"simulated s, {name}" for name in NETWORKS)]
        for panel, name in zip(panels, names, strict=True):
            panel.set(xlabel=name, ylim=(2.5, 4.5))
        for panel in panels[1:]:
            panel.set_xscale("log")
            panel.xaxis.set_minor_formatter(NullFormatter())
        panels[0].set(ylabel="training loss, nats a target")
        panels[0].legend(frameon=False)
        save_figure(figure, FOLDER / "curves.png")


def _spread(values: list[float], digits: int = 3) -> str:
    return f"{statistics.mean(values):.{digits}f} ({statistics.stdev(values):.{digits}f})"


if __name__ == "__main__":
    results = read()
    all_seeds = sorted({seed for _, seed in results})
    draw(results, all_seeds)
    print(loss_table(results, all_seeds), time_table(results, all_seeds), sep="\n\n")
