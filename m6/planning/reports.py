"""The planner's reports, as Markdown."""

from __future__ import annotations

from m6.config.offload import OffloadSettings
from m6.formatting import format_gb, markdown_table
from m6.planning.cost.compute_time import StepTime
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import checkpoint_bytes, copied_bytes
from m6.planning.search.alternatives import alternatives, compression_line, delay_line
from m6.planning.search.job_files import checkpoint_s, signal_lead_s
from m6.planning.search.neighbours import fastest_streamed, neighbours, smallest_cluster
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, Rejection, SearchResult
from m6.planning.search.stages import RunPlan, pseudo_sharing

_HEADER = ("layout", "step s", "device GB", "host GB a node", "tokens/s")


def run_report(plan: RunPlan) -> list[str]:
    """A report of each phase: the plans found by the search, or the reason why there are none."""
    return [
        plan_report(stage, result, whole) if result.plans else no_plan_report(stage, result)
        for stage, result, whole in zip(plan.stages, plan.results, plan.whole, strict=True)
    ]


def plan_report(planner: Planner, result: SearchResult, whole: str = "", num_plans: int = 5) -> str:
    """The best plan, the next ones, and the reason against each neighbour of the best.

    Args:
        whole: see ``RunPlan``.
    """
    best = result.best
    lines = [
        _title(planner),
        "",
        *([f"The cluster has more devices, but with all of them {whole}.", ""] if whole else []),
        f"**{best.layout}, accumulation {best.layout.accumulation(_rows(planner))}**",
        "",
        time_table(best.time),
        "",
        memory_table(planner, best.layout),
        "",
        checkpoint_line(planner, best),
        *(line for line in (compression_line(planner, best), delay_line(planner, best)) if line),
        "",
        layout_table(planner, [best, *(plan for plan in result.plans if plan is not best)][:num_plans]),
        "",
        "Why not otherwise, one choice changed at a time:",
        *(f"- {rejection.reason}" for rejection in neighbours(planner, best)),
        "",
        "What the plan leaves out:",
        *(alternatives(planner, result) or ["- nothing that would apply"]),
        "",
        tally_line(result),
        *notes(planner, best.layout),
    ]
    return "\n".join(lines)


def no_plan_report(planner: Planner, result: SearchResult) -> str:
    """The report if nothing fits: the nearest layout with its memory, and changes that would help."""
    nearest = result.nearest
    lines = [_title(planner), "", "**no layout fits**", ""]
    if nearest is not None:
        lines += [
            f"The nearest, {nearest.layout}, {nearest.reason}:",
            "",
            memory_table(planner, nearest.layout),
            "",
        ]
    lines += _requirements(planner)
    lines.append(tally_line(result))
    return "\n".join(lines)


def _requirements(planner: Planner) -> list[str]:
    """Changes with enough memory for the run: more devices, streamed experts, a Pseudo phase."""
    smallest = smallest_cluster(planner)
    nodes = planner.cluster.nodes[0]
    enough = "with this global batch no number of them holds it"
    if smallest is not None:
        enough = f"{smallest.num_devices} such devices hold it ({smallest.nodes[0].count} nodes)"
    lines = [f"- {nodes.device.name}: {enough}."]
    streamed = fastest_streamed(planner)
    if streamed is not None:
        footprint = streamed.plan.footprint
        on_host = footprint.host * planner.cluster.smallest.devices_per_node
        refused = f" The run as it is cannot take it: {streamed.refusal}." if streamed.refusal else ""
        lines.append(
            f"- Experts streamed from host memory by m6.offload with {_needed_settings(streamed.settings)}: "
            f"{streamed.plan.layout} would need {format_gb(footprint.peak)} on the device and {format_gb(on_host)} in "
            f"the host memory of a node.{refused}"
        )
    if planner.memory.sharing is None and planner.config.m6.pseudo_to_real is None:  # otherwise it has its own report
        # All layers of the Pseudo phase share weights, so it has no pipeline.
        forced = {**planner.forced, "pp_size": 1}
        pseudo = planner.changed(sharing=pseudo_sharing(planner.config), forced=forced).search()
        if pseudo.plans:
            plan = pseudo.best
            lines.append(
                f"- A Pseudo stage, whose layers share weights, fits: {plan.layout}, {format_gb(plan.footprint.peak)}."
            )
    return ["What would hold it:", *lines, ""]


def _needed_settings(settings: OffloadSettings) -> str:
    optimizer = f' and "optimizer.type": "{settings.optimizer.type}"' if settings.optimizer is not None else ""
    return f'"update": "{settings.update}"{optimizer}'


def explanation(planner: Planner, judged: PricedLayout | Rejection) -> str:
    """The price of one layout, or the reason against it."""
    if isinstance(judged, Rejection):
        text = f"{judged.layout}: {judged.reason}"
        if judged.kind == "infeasible":
            return text
        return f"{text}\n\n{memory_table(planner, judged.layout)}"
    lines = [
        _title(planner),
        "",
        f"**{judged.layout}, accumulation {judged.layout.accumulation(_rows(planner))}**",
        "",
        time_table(judged.time),
        "",
        memory_table(planner, judged.layout),
        *notes(planner, judged.layout),
    ]
    return "\n".join(lines)


def time_table(time: StepTime) -> str:
    """The parts of a step."""
    rows = [[name, f"{value:.4g}", f"{value / time.total:.1%}"] for name, value in time.parts().items() if value]
    return markdown_table(("part of a step", "seconds", "share"), [*rows, ["**step**", f"**{time.total:.4g}**", ""]])


def checkpoint_line(planner: Planner, plan: PricedLayout) -> str:
    """Size and duration of a checkpoint, its copy in host memory, and the time of the job's signal."""
    known = "measured" if planner.profile.checkpoint_bytes_per_s else "assumed"
    size, seconds = format_gb(checkpoint_bytes(planner.memory, plan.layout)), checkpoint_s(planner, plan)
    copied = planner.cluster.smallest.devices_per_node * copied_bytes(planner.memory, plan.layout)
    background = planner.config.m6.checkpoint.async_save
    return (
        f"A checkpoint is {size} of a rank and takes {seconds:.0f} s at the {known} rate, "
        f"{'beside the training' if background else 'for which the training waits'}, with {format_gb(copied)} more in "
        f"the host memory of a node (m6.checkpoint.async_save {str(background).lower()}): a job must be told "
        f"{signal_lead_s(planner, plan)} s before its end, enough for two of them."
    )


def memory_table(planner: Planner, layout: ParallelLayout) -> str:
    """The parts of the fullest rank's memory, and the fullest rank of each type of devices."""
    parts, devices = planner.memory(layout).parts(), planner.fullest_devices(layout)
    rows = [[name.replace("_", " "), format_gb(value)] for name, value in parts.items() if value]
    for name, peak, usable in devices:
        where = name if len(devices) > 1 else "device"
        rows.append([f"**{where}, at most**", f"**{format_gb(peak)}** of {format_gb(usable)} usable"])
    return markdown_table(("bytes of the fullest rank", ""), rows)


def tally_line(result: SearchResult) -> str:
    """The number of visited layouts, and of rejected ones by reason."""
    parts = [f"{name} {number:,}" for name, number in sorted(result.counters.items(), key=lambda item: -item[1])]
    return f"{result.visited:,} layouts: {'; '.join(parts)}."


def notes(planner: Planner, layout: ParallelLayout) -> list[str]:
    """Lines about the limits of a layout's figures."""
    device, dtype = planner.time.nodes.device, planner.time.dtype
    found = []
    if dtype not in device.matmul_flops:
        found.append(f"{device.name} has no matrix units for {dtype}: products run at its rate of fp32.")
    if not planner.profile.calibrated:
        found.append(
            f"Uncalibrated ({planner.profile.source}): trust the memory, rank by the times, do not quote them."
        )
    if planner.cluster.is_mixed:
        pace = (
            "all ranks that hold the same layers get the same share of a batch, so the slowest of them sets the pace."
        )
        if layout.shares:
            pace = "each rank gets its share of a batch (m6.parallel.shares), and the last one to end sets the pace."
        found.append(f"Devices differ: {pace} A part of the devices can be faster, and is planned where it is.")
    return ["", *(f"Note: {text}" for text in found)] if found else []


def curve_table(rows: list[tuple[int, PricedLayout | None, str]]) -> str:
    """The rows of :func:`m6.planning.search.planner.curve`, with the throughput as a share of linear scaling."""
    table = []
    first: tuple[int, float] | None = None
    for num_devices, plan, reason in rows:
        if plan is None:
            table.append([str(num_devices), reason, "", "", ""])
            continue
        first = first or (num_devices, plan.time.total)
        linear = first[1] * first[0] / num_devices / plan.time.total
        steps_per_hour = f"{3600 / plan.time.total:,.1f}"
        table.append([str(num_devices), str(plan.layout), f"{plan.time.total:.4g}", steps_per_hour, f"{linear:.0%}"])
    return markdown_table(("devices", "layout", "step s", "steps/h", "of linear"), table, "rlrrr")


def layout_table(planner: Planner, plans: list[PricedLayout]) -> str:
    """One row for each plan."""
    return markdown_table(_HEADER, [_row(planner, plan) for plan in plans])


def _row(planner: Planner, plan: PricedLayout) -> list[str]:
    tokens = _rows(planner) * planner.config.m6.data.sequence_length / plan.time.total
    device, host = plan.footprint.peak / 1e9, planner.host_bytes(plan.layout) / 1e9
    return [str(plan.layout), f"{plan.time.total:.4g}", f"{device:.2f}", f"{host:.1f}", f"{tokens:,.0f}"]


def _rows(planner: Planner) -> int:
    return planner.config.deepspeed.train_batch_size


def _title(planner: Planner) -> str:
    parameters = planner.memory.model.num_parameters
    stage = "" if planner.config.m6.pseudo_to_real is None else ", Real stage"
    if planner.memory.sharing is not None:
        stage = ", Pseudo stage"
    return (
        f"{parameters / 1e9:,.2f} B parameters{stage}, {planner.config.deepspeed.optimizer_type}, global batch "
        f"{_rows(planner)}, on {planner.cluster.num_devices} devices of {planner.cluster.name}"
    )
