"""The recommended configurations from ten billion parameters on, with 64 to 512 of today's devices.

``python -m m6.plots.todays_clusters`` writes a page and a plot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from m6.config.run import load_config
from m6.files import write_text
from m6.formatting import markdown_table
from m6.planning.booking import StageEstimate, book_stage, format_days
from m6.planning.cost.layout import ParallelLayout
from m6.planning.machine.cluster import load_cluster
from m6.planning.search.planner import Planner
from m6.planning.shipped import PLANS, SHIPPED, TIME_LIMIT_MIN
from m6.plots.style import plotting, save_figure

PAGE, PICTURE = PLANS / "README.md", PLANS / "todays_clusters.png"
CLUSTERS = {"H100": "h100_x128", "H200": "h200_x128", "GB200 NVL72": "gb200_x72"}
DEVICES = {"m6_10b": (64, 128), "m6_100b": (64, 128, 256, 512), "m6_1t": (256, 512)}
"""Recommended configuration -> numbers of devices."""


@dataclass(frozen=True)
class Sized:
    """The best plan of a run on a number of devices.

    Attributes:
        booked: None if no layout fits.
        layout: of the same plan.
        lacks: why no layout fits.
    """

    booked: StageEstimate | None
    layout: ParallelLayout | None
    lacks: str = ""


_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)  # days

Plans = Mapping[tuple[str, str, int], Sized]
"""(configuration, label of the cluster, devices) -> plan"""


def plan_size(name: str, label: str, devices: int) -> Sized:
    """Plans the shipped configuration ``name``, a run of one stage, on this many devices of a cluster."""
    planner = Planner(load_config(Path(name)), load_cluster(Path(CLUSTERS[label])).resized(devices))
    result = planner.search()
    if not result.plans:
        return Sized(None, None, "no layout can run" if result.nearest is None else result.nearest.reason)
    return Sized(book_stage(planner, result.best, TIME_LIMIT_MIN), result.best.layout)


def row_of(name: str, label: str, devices: int, plan: Sized) -> list[str]:
    """The row of one plan in the page's table."""
    begin, booked = [name, label, f"{devices}"], plan.booked
    if booked is None:
        return [*begin, *([""] * 6), plan.lacks]
    return [
        *begin,
        format_days(booked.days, booked.days_range),
        f"{booked.gpu_days:,.0f}",
        f"{booked.samples_per_s:,.0f}",
        f"{booked.mfu:.0%}",
        f"{booked.device_gb:,.0f}",
        booked.limited_by,
        f"{plan.layout}",
    ]


def page_of(plans: Plans) -> str:
    """The page, as Markdown."""
    columns = ["configuration", "GPUs", "number", "days (range)", "GPU-days", "samples/s", "utilization", "GB a GPU"]
    columns += ["longest part", "layout, or what it lacks"]
    table = markdown_table(columns, [row_of(*key, plan) for key, plan in plans.items()], "llrrrrrrll")
    pages = "\n".join(f"- [{name}.json]({name}.md) on {cluster}" for name, cluster in SHIPPED.items())
    return f"""# Plans

## Today's clusters

Written by `python -m m6.plots.todays_clusters`: the recommended configurations from ten billion parameters on, with the
samples, steps and precision of their JSONs. Times are of uncalibrated plans, with their range: nothing of the kind ran.
Utilization counts what is computed, of the peak in 16 bits.
`m6 plan m6_10b --cluster h200_x128 --world 64 --out FOLDER` writes the JSON and the job of such a row.

{table}

![Days over GPUs]({PICTURE.name})

## The papers' clusters
{pages}
"""


def digest_of(page: str) -> str:
    """The digest for the plot's metadata: it shows whether the plot belongs to this page."""
    return hashlib.sha256(page.encode()).hexdigest()


def draw(plans: Plans, page: str, out: Path) -> None:
    """Draws days with their ranges over GPUs: a panel for each configuration, a line for each cluster."""
    names = list(dict.fromkeys(name for name, _, _ in plans))
    with plotting() as pyplot:
        figure, panels = pyplot.subplots(1, len(names), figsize=(10, 3), layout="constrained", squeeze=False)
        for axes, name in zip(panels[0], names, strict=True):
            for label in CLUSTERS:
                found = {key[2]: plan.booked for key, plan in plans.items() if key[:2] == (name, label) and plan.booked}
                days = [booked.days for booked in found.values()]
                low, high = ([booked.days_range[bound] for booked in found.values()] for bound in range(2))
                errors = [
                    [day - bound for day, bound in zip(days, low, strict=True)],
                    [bound - day for day, bound in zip(days, high, strict=True)],
                ]
                axes.errorbar(list(found), days, yerr=errors, marker="o", capsize=2, label=label)
            axes.set(title=name, xlabel="GPUs", ylabel="days", xscale="log", yscale="log")
            axes.set_xticks(DEVICES[name], labels=[f"{devices}" for devices in DEVICES[name]], minor=False)
            axes.minorticks_off()
            low, high = axes.get_ylim()
            ticks = [days for days in _TICKS if low <= days <= high]
            axes.set_yticks(ticks, labels=[f"{days:g}" for days in ticks])
        panels[0][0].legend()
        save_figure(figure, out, description=digest_of(page))


def main() -> None:
    """Writes the page and the picture."""
    plans = {
        (name, label, devices): plan_size(name, label, devices)
        for name, numbers in DEVICES.items()
        for label in CLUSTERS
        for devices in numbers
    }
    page = page_of(plans)
    draw(plans, page, PICTURE)
    write_text(PAGE, page)


if __name__ == "__main__":
    main()
