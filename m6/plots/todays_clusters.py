"""The least number of today's devices for each large configuration: ``python -m m6.plots.todays_clusters``.

It writes a page and a plot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m6.config.run import RunConfig, load_config
from m6.errors import UserError
from m6.files import write_text
from m6.formatting import markdown_table
from m6.model.parameters import num_parameters
from m6.planning.booking import StageBooking, book_stage, booking, format_days
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.search.planner import Planner
from m6.planning.search.stages import search_stages, training_stages
from m6.planning.shipped import PLANS, SHIPPED, TIME_LIMIT_MIN
from m6.plots.style import plotting, save_figure
from m6.shipped import CONFIGS

_WEIGHT_BYTES = 2  # of a parameter in 16 bits


@dataclass(frozen=True)
class LeastDevices:
    """A run on the least sufficient number of devices.

    Attributes:
        devices: a power of two of whole nodes.
        total: of ``booking``.
        stages: of the run.
        too_few: why half as many devices are not enough; None: half as many are no whole node.
    """

    devices: int
    total: dict[str, Any]
    stages: list[StageBooking]
    too_few: str | None


def least_devices(config: RunConfig, cluster: Cluster, time_limit_min: int) -> LeastDevices:
    """Plans ``config`` on one node of ``cluster``, then on twice as many, until both stages of the run fit.

    Raises:
        UserError: a batch has fewer samples than the run needs devices.
    """
    devices, too_few = cluster.nodes[0].devices_per_node, None
    while devices <= config.deepspeed.train_batch_size:
        sized = cluster.resized(devices)
        too_few_before, too_few = too_few, _exceeds_all_memory(config, sized)
        if too_few is None:
            planned = _plan(Planner(config, sized), time_limit_min)
            if not isinstance(planned, str):
                return LeastDevices(devices, *planned, too_few_before)
            too_few = planned
        devices *= 2
    raise UserError(f"{cluster.name}: a batch of {config.deepspeed.train_batch_size} has no more devices; {too_few}")


def _plan(planner: Planner, time_limit_min: int) -> tuple[dict[str, Any], list[StageBooking]] | str:
    """The cost of the run, or why one of its stages does not fit."""
    stages = training_stages(planner)
    results = search_stages(stages)
    for result in results:
        if not result.plans:
            return "no layout can run" if result.nearest is None else result.nearest.reason
    booked = [book_stage(stage, result.best, time_limit_min) for stage, result in zip(stages, results, strict=True)]
    return booking(booked, stages[-1]), booked


def _exceeds_all_memory(config: RunConfig, cluster: Cluster) -> str | None:
    """The message for weights larger than all memory of devices and hosts; None otherwise. It saves a search."""
    weights = _WEIGHT_BYTES * num_parameters(config.model)["total"]
    memory = sum(
        node.count * (node.devices_per_node * node.device.memory_bytes + node.host.memory_bytes)
        for node in cluster.nodes
    )
    if weights <= memory:
        return None
    return f"needs {weights / 1e9:,.0f} GB for the weights of {memory / 1e9:,.0f} GB in all devices and hosts"


PAGE, PICTURE = PLANS / "README.md", PLANS / "todays_clusters.png"
CLUSTERS = {"A100-80G": "a100_80g_x128", "H100": "h100_x128", "H200": "h200_x128", "GB200 NVL72": "gb200_x72"}
Sizes = Mapping[str, Mapping[str, LeastDevices]]


def plan_size(name: str, labels: Iterable[str] = CLUSTERS) -> dict[str, LeastDevices]:
    """The least devices of each of these clusters for the shipped configuration ``name``."""
    # Asynchronous checkpoints would keep copies in host memory, and few GPUs need all of it for experts.
    config = load_config(CONFIGS / f"{name}.json", ("m6.checkpoint.async_save=false",))
    clusters = {label: load_cluster(Path(CLUSTERS[label])) for label in labels}
    return {label: least_devices(config, cluster, TIME_LIMIT_MIN) for label, cluster in clusters.items()}


def rows_of(name: str, plans: Mapping[str, LeastDevices]) -> list[list[str]]:
    """The rows of one configuration in the page's table."""
    return [
        [
            name,
            label,
            f"{plan.devices}",
            format_days(plan.total["days"], plan.total["days_range"]),
            f"{plan.total['gpu_days']:,.0f}",
            f"{plan.total['samples_per_s']:,.0f}",
            f"{plan.total['device_gb']:,.0f}",
            f"{plan.total['host_gb']:,.0f}",
            plan.stages[-1].limited_by,
            plan.too_few or "",
        ]
        for label, plan in plans.items()
    ]


def page_of(sizes: Sizes) -> str:
    """The page, as Markdown."""
    columns = ["configuration", "GPUs", "least", "days (range)", "GPU-days", "samples/s", "GB a GPU", "GB a host"]
    columns += ["longest part", "half as many"]
    table = markdown_table(
        columns, [row for name, plans in sizes.items() for row in rows_of(name, plans)], "llrrrrrrll"
    )
    pages = "\n".join(f"- [{name}.json]({name}.md) on {cluster}" for name, cluster in SHIPPED.items())
    return f"""# Plans

The plans of the clusters that the papers name:
{pages}

## Today's clusters

Written by `python -m m6.plots.todays_clusters`: for each shipped configuration the least number of GPUs that trains
all of it, with the samples, the precision and the experts' optimizer of its JSON. Numbers are powers of two of whole
nodes, as the batches are. Times are those of uncalibrated plans, with their range. What the GPUs do not hold lies in
the memory of the hosts, which takes time, so the fewest GPUs are rarely the cheapest: `m6 plan CONFIG --cluster NAME
--world N` plans more of them. So that hosts need no room for copies of checkpoints, the training waits for them
(`"async_save": false`), which the days count. The longest part is that of the last stage. The last column says what a
GPU of half as many needs in the layout that lacks least.

{table}

![Days on the least number of GPUs]({PICTURE.name})
"""


def digest_of(page: str) -> str:
    """The digest for the plot's metadata: it shows whether the plot belongs to this page."""
    return hashlib.sha256(page.encode()).hexdigest()


def draw(sizes: Sizes, page: str, out: Path) -> None:
    """Draws days with their ranges: a panel for each configuration, a bar for each cluster."""
    with plotting() as pyplot:
        figure, panels = pyplot.subplots(1, len(sizes), figsize=(10, 2.8), layout="constrained", sharey=True)
        for axes, (name, plans) in zip(panels, sizes.items(), strict=True):
            days = [plan.total["days"] for plan in plans.values()]
            low, high = zip(*(plan.total["days_range"] for plan in plans.values()), strict=True)
            errors = [
                [day - bound for day, bound in zip(days, low, strict=True)],
                [bound - day for day, bound in zip(days, high, strict=True)],
            ]
            axes.barh(list(plans), days, xerr=errors, height=0.6, capsize=2, color="#4c72b0", ecolor="#555555")
            for place, (plan, end) in enumerate(zip(plans.values(), high, strict=True)):
                label = f"{plan.devices} GPUs\n{plan.total['gpu_days']:,.0f} GPU-days"
                axes.annotate(label, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
            axes.set(title=name, xlabel="days", xlim=(0, 1.5 * max(high)))
            axes.invert_yaxis()
        save_figure(figure, out, description=digest_of(page))


def main() -> None:
    """Writes the page and the picture."""
    sizes = {name: plan_size(name) for name in SHIPPED}
    page = page_of(sizes)
    draw(sizes, page, PICTURE)
    write_text(PAGE, page)


if __name__ == "__main__":
    main()
