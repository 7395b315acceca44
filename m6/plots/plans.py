"""Plots of plans: memory over a step, planned and actual; step time over memory; loss over days."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m6.errors import UserError
from m6.files import parse_object
from m6.planning.search.results import PricedLayout
from m6.plots.style import plotting, save_figure
from m6.training.offloading.report import MEMORY_RECORD

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_NONMODEL, _CHUNKS, _ACTUAL, _BUDGET = "#56B4E9", "#E69F00", "#000000", "#D55E00"
_MIB = 2**20


def plot_memory(run_dir: Path, out: Path | None = None) -> Path:
    """Draws the planned and the actual device memory at each use of a chunk of experts in one step.

    Args:
        run_dir: a run with ``m6.offload``, with two finished steps since its last start.
        out: the PNG to write; by default RUN/memory.png.

    Returns:
        The path of the PNG.

    Raises:
        UserError: the record of the memory is missing or damaged.
    """
    record = _read(run_dir / MEMORY_RECORD)
    out = out or run_dir / "memory.png"
    with plotting() as pyplot:
        figure, axes = pyplot.subplots(figsize=(12, 4.8), layout="constrained")
        _draw(axes, record)
        axes.set_title(f"{run_dir.absolute().name}   device memory over step {record['step'] + 1}, rank 0, MiB")
        save_figure(figure, out)
    return out


def _read(path: Path) -> dict[str, Any]:
    try:
        record = parse_object(path.read_bytes())
        if record["planned"] and record["actual"] and record["budget_bytes"] + record["step"] >= 0:
            return record
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a run with m6.offload writes it after its second step") from None
    except (OSError, ValueError, KeyError, TypeError):
        pass  # reported below, like a record with empty lists
    raise UserError(f"{path}: corrupt, or not the memory record of a run")


def _draw(axes: Axes, record: dict[str, Any]) -> None:
    planned, actual = record["planned"], record["actual"]
    try:
        nonmodel = [moment["nonmodel_bytes"] / _MIB for moment in planned]
        chunks = [moment["chunk_bytes"] / _MIB for moment in planned]
        totals = [moment["total_bytes"] / _MIB for moment in actual]
        actual_nonmodel = [moment["nonmodel_bytes"] / _MIB for moment in actual]
        backward = [moment["backward"] for moment in planned]
    except (KeyError, TypeError):
        raise UserError(f"{MEMORY_RECORD.name}: corrupt: an entry has no bytes") from None
    labels = ["planned: all but experts", "planned: experts owned, kept, in use"]
    axes.stackplot(
        range(len(planned)), nonmodel, chunks, labels=labels, colors=[_NONMODEL, _CHUNKS], alpha=0.5, step="mid"
    )
    axes.step(range(len(totals)), totals, where="mid", color=_ACTUAL, label="actual peak, copies in flight included")
    axes.step(
        range(len(actual_nonmodel)),
        actual_nonmodel,
        where="mid",
        color=_ACTUAL,
        linestyle="dotted",
        label="actual: all but experts",
    )
    budget = record["budget_bytes"] / _MIB
    highest = max([*totals, *(low + high for low, high in zip(nonmodel, chunks, strict=True))])
    if budget < 3 * highest:  # a much larger budget would compress the curves at the bottom of the plot
        axes.axhline(budget, color=_BUDGET, label=f"budget {budget:,.0f}")
    if True in backward:
        axes.axvline(backward.index(True) - 0.5, color="grey", linewidth=0.8)
        axes.text(backward.index(True), 0, " first gradient", va="bottom", color="grey")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("uses of chunks in order")
    axes.legend(loc="lower right")


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
