"""Panels of a Pseudo-to-Real run: the loss over steps, tokens and time, and the divergence of the layers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"pseudo": "#D55E00", "real": "#0072B2"}
CLOCKS = {"step": "step", "tokens": "tokens seen", "minutes": "minutes of steps"}
Entries = list[dict[str, Any]]


def staged(training: Entries) -> Entries:
    """Returns the entries that belong to a stage; empty for a run without stages."""
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
        for name, colour in _COLOURS.items():
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
