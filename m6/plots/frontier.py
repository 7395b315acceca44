"""Plots of plans: step time over device memory, and loss over days."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from m6.planning.search.results import PricedLayout
from m6.plots.style import plotting, save_figure


def draw_frontier(plans: list[PricedLayout], out: Path) -> Path:
    """Draws step time over device memory as a PNG, with one colour per number of devices.

    Args:
        plans: plans with step time and memory.
        out: the PNG to write.

    Returns:
        ``out``.

    Raises:
        UserError: the file cannot be written.
    """
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for count in sorted({plan.layout.world_size for plan in plans}):
            selected = [plan for plan in plans if plan.layout.world_size == count]
            sizes = [20 + 40 * (plan.footprint.host > 0) for plan in selected]  # large markers: states on the host
            axes.scatter(
                [plan.footprint.peak / 1e9 for plan in selected],
                [plan.time.total for plan in selected],
                s=sizes,
                label=f"{count} devices",
            )
        axes.set(xlabel="device memory, GB", ylabel="seconds a step", yscale="log", title="large: states on the host")
        axes.legend()
        save_figure(figure, out)
    return out


def draw_losses(curves: Mapping[str, Sequence[tuple[float, float]]], out: Path, time: str = "days") -> Path:
    """Draws predicted loss over time as a PNG, with one line per curve.

    Args:
        curves: (time, loss in nats a token) by label.
        out: the PNG to write.
        time: label of the horizontal axis.

    Returns:
        ``out``.

    Raises:
        UserError: the file cannot be written.
    """
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for label, points in curves.items():
            times, losses = zip(*points, strict=True)
            axes.plot(times, losses, marker="o", label=label)
        axes.set(xlabel=time, ylabel="predicted loss, nats a token", xscale="log")
        axes.legend()
        save_figure(figure, out)
    return out
