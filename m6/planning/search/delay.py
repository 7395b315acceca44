"""What a plan would gain from gradients that are one step late: on the host, and in pipelines."""

from __future__ import annotations

import copy
from dataclasses import replace

from m6.config.gradient_delay import FLUSHLESS, GradientDelaySettings
from m6.planning.cost.layout import is_flushless
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, format_gb

_WORTH = 0.05
"""Share of a step for which computation has to wait for the host: the delay costs steps, which are not priced."""
_COST = "the steps that this costs are not priced."


def delay_line(planner: Planner, best: PricedLayout) -> str:
    """Markdown: the step with ``m6.gradient_delay``, or what it changes if the run has it; empty if that is too
    little."""
    waiting, total = best.time.host, best.time.total
    if planner.config.m6.gradient_delay is not None:
        return _without_flush(planner, best) if is_flushless(planner.config, best.layout) else ""
    if not best.layout.stream_experts or waiting < _WORTH * total:
        return ""
    late = _changed(planner, GradientDelaySettings(accept_loss=True))
    time, footprint = late.time(best.layout), late.memory(best.layout)
    more = (footprint.host - best.footprint.host) * planner.cluster.smallest.devices_per_node
    refused = late.memory_rejection(best.layout)
    fits = "" if refused is None else f", which does not fit: {refused.reason}"
    return (
        f"The host keeps computation waiting for {waiting:.4g} s. Updates that are one step late (m6.gradient_delay) "
        f"would make it {time.host:.4g} s and the step {time.total:.4g} s ({time.total / total - 1:+.1%}), for "
        f"{format_gb(more)} more in the host memory of a node{fits}; {_COST}"
    )


def _without_flush(planner: Planner, best: PricedLayout) -> str:
    """The pipeline of a run with the delay against the same one with a flush after each step."""
    flushed = _changed(planner, None)
    more = best.footprint.peak - flushed.memory(best.layout).peak
    return (
        "The pipeline goes on from step to step without a flush (m6.gradient_delay), except after every "
        f"{planner.time.pipeline.steps_between_flushes:.3g} steps (where the run logs, evaluates or writes a "
        f"checkpoint). Its ranks wait {best.time.bubble:.4g} s of a step for each other, "
        f"{flushed.time(best.layout).bubble:.4g} s with a flush after each step, for {format_gb(more)} more; {_COST}"
    )


def flushless_line(planner: Planner, best: PricedLayout, pipeline: PricedLayout) -> str:
    """Markdown: the fastest pipeline without a flush between steps, or why there is none.

    Not all layouts are searched again, but those that offload as ``pipeline`` does.

    Args:
        best: the plan.
        pipeline: the fastest with a flush after each step.
    """
    text = "- Pipelines without a flush between steps, whose gradients are one step late (PipeDream-2BW)"
    layout = replace(pipeline.layout, schedule=FLUSHLESS, cut=())
    names = ("schedule", "tp_size", "placement", "offload_optimizer", "offload_params", "stream_experts")
    kept = {name: value for name, value in planner.forced.items() if name != "cut"}
    forced = kept | {name: getattr(layout, name) for name in names}
    # The validation wants the acceptance of an optimizer that learns worse, and of no other.
    ways = [_changed(planner, GradientDelaySettings(accept_loss=accepts), forced) for accepts in (True, False)]
    refusals = [late.feasibility.explain(layout) for late in ways]
    late = next((late for late, refusal in zip(ways, refusals, strict=True) if refusal is None), None)
    if late is None:
        assert refusals[0] is not None
        return f"{text}: {refusals[0].reason}."
    result = late.search(1)
    found = result.fastest(pipeline=True)
    if found is None:
        missing = "" if result.nearest is None else f": {result.nearest.layout} {result.nearest.reason}"
        return f"{text}: none fits{missing}."
    return (
        f"{text}: with m6.gradient_delay the fastest, {found.layout}, would take {found.time.total:.4g} s a step "
        f"({found.time.total / best.time.total - 1:+.1%}) and {format_gb(found.footprint.peak)}, with a second version "
        f"of the weights. Its ranks would wait {found.time.bubble / found.time.total:.1%} of a step for each other, "
        f"with a flush after every {late.time.pipeline.steps_between_flushes:.3g} steps; {_COST}"
    )


def _changed(
    planner: Planner, section: GradientDelaySettings | None, forced: dict[str, object] | None = None
) -> Planner:
    """The planner of the run with another ``m6.gradient_delay``; the run is not validated."""
    m6 = planner.config.m6.model_copy(update={"gradient_delay": section})
    document = copy.deepcopy(planner.config.document)
    document["m6"]["gradient_delay"] = None if section is None else section.model_dump()
    changed = replace(planner.config, m6=m6, document=document)
    return planner.changed(config=changed, forced=planner.forced if forced is None else forced)
