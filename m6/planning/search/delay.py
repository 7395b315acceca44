"""What a plan would gain from host updates that are one step late."""

from __future__ import annotations

from dataclasses import replace

from m6.config.gradient_delay import GradientDelaySettings
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, format_gb

_WORTH = 0.05
"""Share of a step for which computation has to wait for the host: the delay costs steps, which are not priced."""


def delay_line(planner: Planner, best: PricedLayout) -> str:
    """Markdown: the step with ``m6.gradient_delay``; empty if that gains too little, or the run has it already."""
    waiting, total = best.time.host, best.time.total
    if not best.layout.stream_experts or planner.config.m6.gradient_delay is not None or waiting < _WORTH * total:
        return ""
    section = GradientDelaySettings(accept_loss=True)  # not validated: the optimizers decide whether it is needed
    m6 = planner.config.m6.model_copy(update={"gradient_delay": section})
    late = planner.changed(config=replace(planner.config, m6=m6))
    time, footprint = late.time(best.layout), late.memory(best.layout)
    more = (footprint.host - best.footprint.host) * planner.cluster.smallest.devices_per_node
    refused = late.memory_rejection(best.layout)
    fits = "" if refused is None else f", which does not fit: {refused.reason}"
    return (
        f"The host keeps computation waiting for {waiting:.4g} s. Updates that are one step late (m6.gradient_delay) "
        f"would make it {time.host:.4g} s and the step {time.total:.4g} s ({time.total / total - 1:+.1%}), for "
        f"{format_gb(more)} more in the host memory of a node{fits}; the steps that this costs are not priced."
    )
