"""Writes the plans of the papers' configurations in configs/plans: ``python -m m6.planning.shipped``."""

from __future__ import annotations

from pathlib import Path

from m6.config.run import RunConfig, load_config, parse_config
from m6.files import write_text
from m6.planning.booking import MANY_WITHOUT_EXPERT, StageEstimate, book_stage, booking_table
from m6.planning.cost.layout import ParallelLayout
from m6.planning.loss import shipped_law
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.reports import no_plan_report, run_report
from m6.planning.routed import all_three, routed
from m6.planning.search.job_files import job_description, sbatch_header
from m6.planning.search.planner import Planner
from m6.planning.search.stages import plan_run
from m6.shipped import CONFIGS
from moe.expectation import expected_routing

PLANS = CONFIGS / "plans"
SHIPPED = {"m6t_100b": "v100_32g_x128", "m6t_1t": "v100_32g_x480", "m6_10t": "v100_32g_x512"}
TIME_LIMIT_MIN = 24 * 60


def shipped_plan(name: str) -> str:
    """The page of one configuration, as Markdown."""
    cluster = load_cluster(Path(SHIPPED[name]))
    planner = Planner(load_config(Path(name)), cluster)
    lines = [
        f"# The plan of {name}.json",
        "",
        f"Written by `python -m m6.planning.shipped`; the same as `m6 plan configs/papers/{name}.json --cluster "
        f"{SHIPPED[name]}`. GB are 10^9 bytes; nine tenths of a memory may be planned for.",
    ]
    booked: list[StageEstimate] = []
    found = plan_run(planner)
    stages, results = found.stages, found.results
    for stage, result, report in zip(stages, results, run_report(found), strict=True):
        lines += ["", f"## {'The Pseudo stage' if stage.memory.sharing is not None else 'The run'}", "", report]
        if result.plans:
            header = sbatch_header(job_description(stage, result.best, TIME_LIMIT_MIN), name)
            lines += ["", "```", header.rstrip(), "```"]
            booked.append(book_stage(stage, result.best, TIME_LIMIT_MIN))
    if len(booked) == len(stages):
        lines += ["", "## To book", "", booking_table(booked, stages[-1], TIME_LIMIT_MIN)]
        if booked[-1].tokens_without_expert > MANY_WITHOUT_EXPERT:
            lines += ["", without_expert(planner.config)]
        if planner.config.model.moe_config().capacity_rule == "1":
            lines += ["", "## The same with capacity k", "", _with_capacity_k(name, cluster)]
    if planner.config.expert_store is not None and len(stages) == 1:
        lines += ["", "## Why not with Adam", "", _without_store(planner, results[-1].best.layout)]
    return "\n".join(lines) + "\n"


def without_expert(config: RunConfig) -> str:
    """The share of tokens without an expert in a layer, as expected and as counted in the routing itself."""
    moe, tokens = config.model.moe_config(), config.deepspeed.micro_batch_size * config.m6.data.sequence_length
    padded = int(shipped_law().fill * tokens)
    few, one, two = (expected_routing(moe, n).tokens_without_expert for n in (padded, tokens, 2 * tokens))
    (training, evaluation, alone), twice = all_three(config), routed(config, 2 * tokens, training=True)
    return (
        f"**{one:.0%} to {two:.0%} of the tokens get no expert in a layer**: of {tokens:,}, a micro-batch without "
        f"padding, and of {2 * tokens:,}. `moe.routing.route` with these settings, random inputs and random router "
        f"weights left {training.without:.0%} and {twice.without:.0%}. Of the {padded:,} tokens of a micro-batch with "
        f"as much padding as the law's runs had, {few:.0%} are expected to get none. The gates of a token add up to "
        f"{training.gates:.2g} in training, {evaluation.gates:.2g} in evaluation with the same tokens, and "
        f"{alone.gates:.2g} for a token alone, as in generation, where all {moe.experts_per_token} chosen experts "
        "compute it."
    )


def _with_capacity_k(name: str, cluster: Cluster) -> str:
    """The cost of the run with capacity for all choices of a token instead of one."""
    found = plan_run(Planner(load_config(Path(name), ('m6.moe.capacity_rule="k"',)), cluster))
    stages, results = found.stages, found.results
    for stage, result in zip(stages, results, strict=True):
        if not result.plans:
            return no_plan_report(stage, result)
    booked = [book_stage(stage, result.best, TIME_LIMIT_MIN) for stage, result in zip(stages, results, strict=True)]
    layouts = " then ".join(f"{result.best.layout}" for result in results)
    return f"In its own best layout: {layouts}.\n\n{booking_table(booked, stages[-1], TIME_LIMIT_MIN)}"


def _without_store(planner: Planner, layout: ParallelLayout) -> str:
    """The needs of the run with experts updated by DeepSpeed on the device, with the optimizer of the rest."""
    document = planner.config.document
    document["m6"].pop("offload")
    adam = Planner(parse_config(document), planner.cluster, forced={"offload_optimizer": False})
    experts, device = planner.memory.stored_experts(layout), planner.cluster.smallest.device
    return (
        f"A rank of the plan holds {experts:,} parameters of experts. In 16 bits with gradients they take 4 bytes each "
        f"and their fp32 masters with Adam's two moments 12 more, {16 * experts:,} bytes, on a device of "
        f"{device.memory_bytes:,}. Adafactor keeps means of rows and columns alone.\n\n"
        f"{no_plan_report(adam, adam.search())}"
    )


def main() -> None:
    """Writes all pages."""
    for name in SHIPPED:
        write_text(PLANS / f"{name}.md", shipped_plan(name))


if __name__ == "__main__":
    main()
