"""Plot of a run's curves: losses, schedule, speed, experts and stages.

Panels of a Pseudo-to-Real run: the loss over steps, tokens and time, and the divergence of the layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from m6.data.objectives import OBJECTIVES
from m6.errors import UserError
from m6.evaluation.baselines import ORDERS, read_baselines
from m6.plots.style import plotting, save_figure
from m6.runs.directory import RunDirectory, noise_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_STAGE_COLOURS = {"pseudo": "#D55E00", "real": "#0072B2"}
CLOCKS = {"step": "step", "tokens": "tokens seen", "minutes": "minutes of steps"}
Entries = list[dict[str, Any]]


def staged(training: Entries) -> Entries:
    """Returns the entries with the key ``stage`` (the phase, Pseudo or Real); empty for a run without it."""
    return [entry for entry in training if "stage" in entry]


def clocks(entries: Entries) -> dict[str, list[float]]:
    """Returns the steps, tokens and minutes of each entry, by the keys of CLOCKS.

    Minutes are the sum of the step times. Validation and the time between attempts are not included.
    """
    steps = [entry["step"] for entry in entries]
    minutes, sum_s = [], 0.0
    for before, entry in pairwise([{"step": 0}, *entries]):
        sum_s += (entry["step"] - before["step"]) * entry["step_time_s"]
        # step_time_s is the mean over the steps since the previous entry.
        minutes.append(sum_s / 60)
    return {"step": steps, "tokens": [entry["tokens_seen"] for entry in entries], "minutes": minutes}


def switch_step(entries: Entries) -> int | None:
    """Returns the step after which the run was delinked, or None if it was not."""
    return next((e["stage"]["switch_step"] for e in entries if e["stage"]["name"] == "real"), None)


def draw_losses(panels: list[Axes], entries: Entries) -> None:
    """Draws the training loss over steps, tokens and minutes, with the switch marked.

    Args:
        panels: one for each of CLOCKS.
        entries: training entries with stages.
    """
    losses, switch = [entry["loss"] for entry in entries], switch_step(entries)
    for axes, (clock, values) in zip(panels, clocks(entries).items(), strict=True):
        for name, colour in _STAGE_COLOURS.items():
            indices = [i for i, entry in enumerate(entries) if entry["stage"]["name"] == name]
            if indices:
                mib = entries[indices[-1]]["stage"]["state_bytes"] / 2**20
                label = f"{name.capitalize()}, {mib:,.3g} MiB of state"
                axes.plot([values[i] for i in indices], [losses[i] for i in indices], color=colour, label=label)
        at = next((v for v, entry in zip(values, entries, strict=True) if entry["step"] == switch), None)
        if at is not None:
            mark_switch(axes, at)
        axes.set_title(f"loss over {CLOCKS[clock]}")
        axes.set_xlabel(CLOCKS[clock])
    panels[0].set_ylabel("nats per target")
    panels[0].legend(loc="upper right", fontsize=8, framealpha=0.9, edgecolor="none")


def draw_layers(axes: Axes, entries: Entries, key: str, title: str) -> None:
    """Draws a measurement per layer, or per pair of layers: the mean as a line, minimum to maximum as a band.

    Args:
        axes: the panel.
        entries: training entries with stages.
        key: key of the measurement in an entry's stage.
        title: title of the panel.
    """
    measured = [entry for entry in entries if key in entry["stage"]]
    steps, values = [entry["step"] for entry in measured], [entry["stage"][key] for entry in measured]
    if measured:
        lowest, highest = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(steps, lowest, highest, color="#009E73", alpha=0.2, label="lowest to highest")
        axes.plot(steps, [sum(v) / len(v) for v in values], color="#009E73", marker=".", label="mean")
        axes.legend(fontsize=8, frameon=False)
    switch = switch_step(entries)
    if switch is not None:
        mark_switch(axes, switch)
    axes.set_title(title)


def mark_switch(axes: Axes, at: float) -> None:
    """Draws a vertical line at the switch from Pseudo to Real."""
    axes.axvline(at, color="#5a5a5a", linestyle="dashed", linewidth=1.1)
    axes.annotate(
        "switch", (at, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points", fontsize=8
    )


# The palette of Okabe and Ito: people with colour vision deficiency can distinguish its colours.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#999999")
# Each objective has its own panel, so colours may repeat.
_COLOURS = dict(zip(OBJECTIVES, itertools.cycle(_PALETTE), strict=False))
_GREY = "#5a5a5a"
_BASELINE_STYLES = dict(zip(ORDERS, ("dotted", "dashdot", "dashed"), strict=True))
_EXPERT_PANELS = {
    "load_cv": "load of the experts: deviation / mean",
    "dropped_fraction": "choices beyond capacity, share",
    "unused_experts": "experts without a token",
    "router_entropy": "router entropy, nats",
}


def plot_run(run_dir: Path, out: Path | None = None) -> Path:
    """Draws the curves of a run.

    All runs have losses, learning rate, gradient norm and speed. Sparse models add load, drops and router entropy of
    the experts. Pseudo-to-Real runs add the loss over steps, tokens and time, and the divergence of the layers.

    Args:
        run_dir: a run with at least one line in metrics.jsonl. If RUN/baselines.json exists (``m6 evaluate`` makes it),
            the losses of the n-gram models are drawn too.
        out: the PNG to write; by default RUN/curves.png.

    Returns:
        The path of the PNG.

    Raises:
        UserError: the run has no training metrics yet, or the file cannot be written.
    """
    from matplotlib.ticker import LogFormatter

    run = RunDirectory(run_dir)
    metrics = run.read_metrics()
    training = [entry for entry in metrics if "loss" in entry]
    validation = [entry for entry in metrics if "validation" in entry]
    if not training:
        raise UserError(f"{run.metrics}: holds no training metrics yet")
    objectives = [name for name in OBJECTIVES if any(name in entry["objectives"] for entry in training)]
    experts = [entry for entry in training if "experts" in entry]
    stages = staged(training)
    baselines = read_baselines(run_dir)
    out = out or run_dir / "curves.png"
    with plotting() as pyplot:
        rows = 2 + bool(experts) + bool(stages)
        figure = pyplot.figure(figsize=(14, 1.0 + 3.2 * rows), layout="constrained")
        last = training[-1]
        figure.suptitle(
            f"{run_dir.absolute().name}   step {last['step']:,}   {last['tokens_seen']:,} tokens",
            x=0.01,
            ha="left",
            fontweight="bold",
        )
        grid = figure.add_gridspec(rows, 1, height_ratios=[1.25, *[1] * (rows - 1)])
        top = grid[0].subgridspec(1, len(objectives))
        for column, name in enumerate(objectives):
            _draw_loss(figure.add_subplot(top[column]), name, training, validation, baselines.get(name, {}))
        noisy = [entry for entry in training if "gradient_noise" in entry]
        middle = grid[1].subgridspec(1, 3 + bool(noisy))
        rate, norm, speed = (figure.add_subplot(middle[column]) for column in range(3))
        rate.plot([entry["step"] for entry in training], [entry["learning_rate"] for entry in training], color=_GREY)
        rate.set_title("learning rate")
        rate.yaxis.set_major_formatter("{x:g}")
        _draw_series(norm, training, "grad_norm", "gradient norm")
        norm.set_yscale("log")
        norm.yaxis.set_major_formatter(LogFormatter())
        norm.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 1)))
        _draw_series(speed, training, "tokens_per_second", "tokens per second")
        speed.yaxis.set_major_formatter("{x:,.0f}")
        for axes in (rate, speed):
            axes.set_ylim(bottom=0)
        if noisy:
            _draw_noise(figure.add_subplot(middle[3]), noisy)
        if experts:
            bottom = grid[2].subgridspec(1, len(_EXPERT_PANELS))
            for column, (key, title) in enumerate(_EXPERT_PANELS.items()):
                _draw_layers(figure.add_subplot(bottom[column]), experts, key, title, legend=column == 0)
        for axes in figure.axes:
            axes.set_xlabel("step")
        if stages:
            last_row = grid[rows - 1].subgridspec(1, 5)
            panels = [figure.add_subplot(last_row[column]) for column in range(5)]
            draw_losses(panels[:3], stages)
            draw_layers(panels[3], stages, "gradient_correlation", "correlation of gradients")
            draw_layers(panels[4], stages, "layer_divergence", "distance from the mean layer")
            for axes in panels[3:]:
                axes.set_xlabel("step")
        save_figure(figure, out)
    return out


def _draw_loss(axes: Axes, objective: str, training: Entries, validation: Entries, baselines: dict[str, float]) -> None:
    colour = _COLOURS[objective]
    entries = [entry for entry in training if entry["objectives"].get(objective) is not None]
    steps = [entry["step"] for entry in entries]
    losses = [entry["objectives"][objective] for entry in entries]
    axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8, label="training")
    axes.plot(steps, smoothed(losses), color=colour, linewidth=1.6, label="training, smoothed")
    points = [
        (entry["step"], entry["validation"][objective]) for entry in validation if objective in entry["validation"]
    ]
    if points:
        label = f"validation, last {points[-1][1]:.2f}"
        # Above the curves: validation is rare, and its points would be covered.
        axes.plot(*zip(*points, strict=True), "o", color=colour, mec="white", ms=6, zorder=4, label=label)
    for name, loss in baselines.items():
        style = _BASELINE_STYLES[name]
        axes.axhline(loss, color=_GREY, linestyle=style, linewidth=1.1, label=f"{name} {loss:.2f}")
    axes.set_title(objective.replace("_", " "), fontweight="bold", color=colour)
    axes.set_ylabel("nats per target")
    # Losses fall, so the upper right corner is empty. The opaque box keeps baselines out of the text.
    axes.legend(loc="upper right", fontsize=8, framealpha=0.9, edgecolor="none")


def _draw_series(axes: Axes, entries: Entries, key: str, title: str) -> None:
    entries = [entry for entry in entries if entry[key] is not None]  # null: not finite, so the step was skipped
    steps, values = [entry["step"] for entry in entries], [entry[key] for entry in entries]
    axes.plot(steps, values, color=_GREY, alpha=0.3, linewidth=0.8, label="measured")
    axes.plot(steps, smoothed(values), color=_GREY, linewidth=1.6, label="smoothed")
    axes.set_title(title)
    axes.legend(fontsize=8, frameon=False)


def _draw_noise(axes: Axes, entries: Entries) -> None:
    """The noise scale at each point, over the second half of the run so far: single estimates scatter."""
    scales = [noise_scale(entries[end // 2 : end]) for end in range(1, len(entries) + 1)]
    values = [np.nan if scale is None else scale for scale in scales]
    axes.plot([entry["step"] for entry in entries], values, color=_GREY, linewidth=1.6)
    axes.set_title("gradient noise scale, samples")
    axes.set_ylim(bottom=0)


def _draw_layers(axes: Axes, entries: Entries, key: str, title: str, legend: bool) -> None:
    from matplotlib import colormaps

    steps = [entry["step"] for entry in entries]
    values = np.array([entry["experts"][key] for entry in entries], dtype=np.float64)
    layers = values.shape[1]
    for layer in range(layers):
        shade = colormaps["viridis"](0.9 * layer / max(1, layers - 1))
        # The legend names the first and the last layer; the colours between them are interpolated.
        label = f"sparse layer {layer + 1} of {layers}" if layer in (0, layers - 1) else None
        axes.plot(steps, values[:, layer], color=shade, linewidth=1.2, label=label)
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    if legend:
        axes.legend(frameon=False)


def smoothed(values: Sequence[float]) -> NDArray[np.float64]:
    """Returns a centred weighted mean over about 5 % of the curve. Non-finite values are ignored.

    The window is cut at the ends of the curve.
    """
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return array
    finite = np.isfinite(array)
    half = len(array) // 40
    kernel = np.hanning(2 * half + 3)[1:-1]
    weight = np.convolve(finite, kernel, mode="same")
    total = np.convolve(np.where(finite, array, 0.0), kernel, mode="same")
    return np.divide(total, weight, out=np.full(len(array), np.nan), where=weight > 0)
