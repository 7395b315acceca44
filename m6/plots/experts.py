"""Heat maps of the load of every expert over training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from m6.errors import UserError
from m6.plots.style import plotting, save_figure
from m6.runs.directory import RunDirectory
from m6.training.reporting.experts import decode_loads

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

_MAX_COLUMNS = 4
_FACTOR = 4.0  # the colour scale ends at a quarter of the mean load and at four times the mean load


def plot_experts(run_dir: Path, out: Path | None = None) -> Path:
    """Draws a heat map for every sparse layer: the load of each expert (y) over the steps (x), relative to the mean.

    The experts of a prototype stand together, between two lines.

    Args:
        run_dir: a run of a sparse model with loads in its metrics.jsonl.
        out: the PNG to write; by default RUN/experts.png.

    Returns:
        The path of the PNG.

    Raises:
        UserError: the metrics hold no loads, or damaged ones.
    """
    steps, loads, prototypes = _read_loads(RunDirectory(run_dir))
    layers = loads.shape[1]
    columns = min(layers, _MAX_COLUMNS)
    rows = math.ceil(layers / columns)
    out = out or run_dir / "experts.png"
    with plotting(axes__grid=False) as pyplot:
        figure, grid = pyplot.subplots(
            rows, columns, figsize=(2 + 3.6 * columns, 1.2 + 2.8 * rows), layout="constrained", squeeze=False
        )
        figure.suptitle(
            f"{run_dir.absolute().name}   load of each expert over the mean of its layer; black: none",
            x=0.01,
            ha="left",
        )
        for layer, axes in enumerate(grid.flat):
            if layer < layers:
                image = _draw_layer(axes, steps, loads[:, layer], prototypes)
                axes.set_title(f"sparse layer {layer + 1} of {layers}")
            else:
                axes.axis("off")
        bar = figure.colorbar(image, ax=grid, extend="both", shrink=0.8)
        ticks = [2.0**power for power in range(-2, 3)]
        bar.set_label("load over the mean")
        bar.set_ticks([math.log2(tick) for tick in ticks], labels=[f"{tick:g}x" for tick in ticks])
        save_figure(figure, out)
    return out


def _read_loads(run: RunDirectory) -> tuple[list[int], NDArray[np.float32], int]:
    """Returns the steps [N] of the lines with loads, the loads [N, layers, E], and the number of prototypes."""
    entries: list[dict[str, Any]] = [entry for entry in run.read_metrics() if "loads" in entry.get("experts", {})]
    if not entries:
        raise UserError(f"{run.metrics}: holds no loads of experts; the model is dense, or nothing was logged yet")
    try:
        loads = np.stack([[decode_loads(text) for text in entry["experts"]["loads"]] for entry in entries])
        prototypes = len(entries[-1]["experts"]["prototypes"]["load_cv"][0])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{run.metrics}: corrupt loads of experts: {error}") from None
    return [entry["step"] for entry in entries], loads, prototypes


def _draw_layer(axes: Axes, steps: list[int], loads: NDArray[np.float32], prototypes: int) -> AxesImage:
    """Draws loads [N, E] on a log scale: white is the mean load, red is more, blue is less, black is 0."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    limit = math.log2(_FACTOR)
    powers = np.ma.log2(loads)  # masks zeros; they are drawn in the colour "bad"
    colours = colormaps["RdBu_r"].with_extremes(bad="black")
    num_experts = loads.shape[1]
    # A column covers the steps from the previous log line to its own.
    edges = np.array([0 if len(steps) == 1 else max(0, 2 * steps[0] - steps[1]), *steps], dtype=np.float64)
    image = axes.pcolormesh(edges, np.arange(num_experts + 1), powers.T, cmap=colours, vmin=-limit, vmax=limit)
    for prototype in range(1, prototypes):
        axes.axhline(prototype * num_experts / prototypes, color="black", linewidth=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("expert")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image  # type: ignore[return-value]
