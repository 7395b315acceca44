"""What ``m6.communication`` would save in a plan, or why it is worth nothing."""

from __future__ import annotations

from m6.config.communication import CommunicationSettings
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout

# Usual choices: the densities and the rank of scripts/experiments/gradient_bytes.
_CHOICES = (
    CommunicationSettings(gradients="top_k", density=0.01),
    CommunicationSettings(gradients="chunks", density=0.5),
    CommunicationSettings(gradients="powersgd", rank=4),
)
_WORTH = 0.05
"""Share of a step that a reducer has to save: it costs steps, which is not priced."""


def compression_line(planner: Planner, best: PricedLayout) -> str:
    """Markdown: the share of gradients in a step, and what the reducers would make of it; empty on one device, and
    where they may not reduce."""
    layout, total = best.layout, best.time.total
    if (
        layout.dp_size == 1
        or layout.pp_size > 1
        or layout.tp_size > 1
        or layout.zero_stage == 3
        or planner.config.m6.communication.compresses
    ):
        return ""
    passes = layout.backward_passes(planner.config.deepspeed.train_batch_size)
    factor = planner.profile.factor("reduction")

    def seconds(settings: CommunicationSettings) -> float:
        return factor * planner.time.reduction.gradients(layout, passes, settings)

    whole = seconds(CommunicationSettings())
    fastest = min(_CHOICES, key=seconds)
    saved = (whole - seconds(fastest)) / total
    line = f"Gradients that all ranks have are summed in {whole:.4g} s, {whole / total:.1%} of a step. "
    if saved < _WORTH:
        return f"{line}Fewer bytes for them (m6.communication) are worth nothing: at most {max(0.0, saved):.1%}."
    needs = " at ZeRO 0 or 1" if layout.zero_stage == 2 else ""
    return (
        f"{line}Fewer bytes (m6.communication) would shorten it by {saved:.0%} with {fastest.gradients}{needs}; the "
        "steps that this costs are not priced."
    )
