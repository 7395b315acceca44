"""Writes configs/plans, the plans of the configurations that name a cluster: ``python -m m6.planning.shipped``."""

from __future__ import annotations

from pathlib import Path

from m6.config.run import load_config
from m6.files import write_text
from m6.planning.booking import StageBooking, book_stage, booking_table
from m6.planning.machine.cluster import load_cluster
from m6.planning.reports import no_plan_report, search_report
from m6.planning.search.job_files import job_description, sbatch_header
from m6.planning.search.planner import Planner, training_stages
from m6.shipped import CONFIGS

PLANS = CONFIGS / "plans"
SHIPPED = {"m6_100b": "a100_80g_x128", "m6_1t": "v100_32g_x480", "m6_10t": "v100_32g_x512"}
_ADAM = 'optimizer={"type": "AdamW", "params": {"lr": 1e-4}}'
_TIME_LIMIT_MIN = 24 * 60


def shipped_plan(name: str) -> str:
    """The page of one configuration, as Markdown."""
    cluster = load_cluster(Path(SHIPPED[name]))
    planner = Planner(load_config(CONFIGS / f"{name}.json"), cluster)
    lines = [
        f"# The plan of {name}.json",
        "",
        f"Written by `python -m m6.planning.shipped`; the same as `m6 plan configs/{name}.json --cluster "
        f"{SHIPPED[name]}`. GB are 10^9 bytes; nine tenths of a memory may be planned for.",
    ]
    booked: list[StageBooking] = []
    stages = training_stages(planner)
    for stage in stages:
        result = stage.search()
        lines += ["", f"## {'The Pseudo stage' if stage.memory.sharing is not None else 'The run'}", ""]
        lines.append(search_report(stage, result))
        if result.plans:
            header = sbatch_header(job_description(stage, result.best, _TIME_LIMIT_MIN), name)
            lines += ["", "```", header.rstrip(), "```"]
            booked.append(book_stage(stage, result.best, _TIME_LIMIT_MIN))
    if len(booked) == len(stages):
        lines += ["", "## To book", "", booking_table(booked, stages[-1], _TIME_LIMIT_MIN)]
    if planner.config.deepspeed.optimizer_type == "Adafactor" and len(training_stages(planner)) == 1:
        adam = Planner(load_config(CONFIGS / f"{name}.json", (_ADAM,)), cluster, forced={"offload_optimizer": False})
        layout = training_stages(planner)[0].search().best.layout
        experts = planner.memory.counts(layout).experts
        lines += [
            "",
            "## Why not with Adam",
            "",
            f"A rank of the plan holds {experts:,} parameters of experts. In fp32 with gradients they take 8 bytes "
            f"each, {8 * experts:,} bytes, and Adam's two moments 8 more, {16 * experts:,} bytes, on a device of "
            f"{cluster.smallest.device.memory_bytes:,}. Adafactor's means of rows and columns are "
            f"{planner.memory(layout).optimizer_state:,} bytes of all parameters of the rank.",
            "",
            no_plan_report(adam, adam.search()),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes all pages."""
    for name in SHIPPED:
        write_text(PLANS / f"{name}.md", shipped_plan(name))


if __name__ == "__main__":
    main()
