"""Prices of alternatives to a plan, for its report.

The alternatives are a pipeline, or none; gradients one step late, on the host and in pipelines; token slices; tensor
parallelism; compressed gradients; unequal shares of a batch.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

from m6.architecture.communication_volume import (
    PLACEMENTS,
    PlacementName,
    volume_of_attention,
    volume_of_divided_tokens,
    volume_of_expert,
    volume_of_feed_forward,
    volume_of_pair,
)
from m6.config.combinations import SLICES, Run, refusals
from m6.config.communication import CommunicationSettings
from m6.config.pipeline import ONE_STAGE, ParallelSettings, PipelineSettings
from m6.config.section_checks import check_slices
from m6.config.sections import GradientDelaySettings
from m6.errors import UserError
from m6.formatting import format_gb
from m6.planning.cost.layout import ParallelLayout, is_asynchronous
from m6.planning.machine.cluster import rate
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, Rejection, SearchResult
from m6.training.engine.sliced_pipeline import slice_tokens, slice_work

# Usual choices: the densities and the rank of scripts/experiments/gradient_bytes.
_CHOICES = (
    CommunicationSettings(gradients="top_k", density=0.01),
    CommunicationSettings(gradients="chunks", density=0.5),
    CommunicationSettings(gradients="powersgd", rank=4),
)
_WORTH = 0.05
"""The least share of a step to name an alternative: saved by a reducer, or spent waiting for the host. Reducers and
late gradients need more steps, and these are not priced."""


def compression_line(planner: Planner, best: PricedLayout) -> str:
    """Markdown: the share of gradients in a step, and the gain from compressing them.

    Empty without data parallelism, for pipelines, tensor groups and ZeRO 3, and for runs that compress already.
    """
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
    needs = " and gradients as at ZeRO 1" if layout.zero_stage == 2 else ""
    return (
        f"{line}Fewer bytes (m6.communication) would shorten it by {saved:.0%} with {fastest.gradients}{needs}; the "
        "steps that this costs are not priced."
    )


_COST = "the steps that this costs are not priced."


def delay_line(planner: Planner, best: PricedLayout) -> str:
    """Markdown: the step with ``m6.gradient_delay``, or its effect if the run has it. Empty if the gain is too
    small."""
    waiting, total = best.time.host, best.time.total
    if planner.config.m6.gradient_delay is not None:
        return _without_flush(planner, best) if is_asynchronous(planner.config, best.layout) else ""
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
    """Compares the asynchronous pipeline of a run with the same pipeline with a flush after each step."""
    flushed = _changed(planner, None)
    more = best.footprint.peak - flushed.memory(best.layout).peak
    return (
        "The pipeline goes on from step to step without a flush (m6.gradient_delay), except after every "
        f"{planner.time.pipeline.steps_between_flushes:.3g} steps (where the run logs, evaluates or writes a "
        f"checkpoint). Its ranks wait {best.time.bubble:.4g} s of a step for each other, "
        f"{flushed.time(best.layout).bubble:.4g} s with a flush after each step, for {format_gb(more)} more; {_COST}"
    )


def async_line(planner: Planner, best: PricedLayout, pipeline: PricedLayout) -> str:
    """Markdown: the fastest pipeline without a flush between steps, or the reason why there is none.

    The search is limited to layouts with the offloading and the tensor groups of ``pipeline``.

    Args:
        best: the plan.
        pipeline: the fastest with a flush after each step.
    """
    text = "- Pipelines without a flush between steps, whose gradients are one step late (PipeDream-2BW)"
    layout = replace(pipeline.layout, schedule=ONE_STAGE, cut=())
    names = ("schedule", "tp_size", "placement", "offload_optimizer", "offload_params", "stream_experts")
    kept = {name: value for name, value in planner.forced.items() if name != "cut"}
    forced = kept | {name: getattr(layout, name) for name in names}
    # The validation requires accept_loss for optimizers hurt by late gradients, and refuses it for all others.
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


_RANKS = 64
"""The fewest ranks that are a square and a cube."""


def tensor_line(planner: Planner, best: PricedLayout) -> str:
    """A Markdown item: the fastest layout of each placement against the plan. With experts: the elements received by
    a rank."""
    if planner.config.m6.moe is not None:
        return _experts_line(planner, best.layout)
    prices = [_price(planner, best, placement) for placement in (None, *PLACEMENTS)]
    return f"- Divided matrices (m6.parallel.tensor): {'; '.join(prices)}."


def _price(planner: Planner, best: PricedLayout, placement: PlacementName | None) -> str:
    name = "whole matrices without a pipeline" if placement is None else placement
    plan = _fastest(planner, placement)
    if plan is None:
        return f"{name}: none runs and fits"
    layout, ratio = plan.layout, plan.time.total / best.time.total - 1
    verdict = "this plan" if layout == best.layout else f"{ratio:+.1%} step time"
    if placement is None:
        return f"{name}: {verdict}"
    return (
        f"{name} on {layout.tp_size} ranks with micro-batches of {layout.micro_batch_size}: {verdict}, of which "
        f"{plan.time.exchange / plan.time.total:.0%} to receive {_received(planner, layout):,.0f} elements a rank"
    )


def _received(planner: Planner, layout: ParallelLayout) -> float:
    """Elements received by a rank in a step for the matrices of all layers, without recomputation."""
    model, batch = planner.config.model, planner.memory.batch_of(layout)
    tokens, steps = batch.rows * batch.sequence_length, layout.accumulation(planner.config.deepspeed.train_batch_size)
    assert layout.placement != "megatron"
    each = volume_of_attention(layout.tp_size, tokens, model.hidden_size)
    each += volume_of_feed_forward(layout.placement, layout.tp_size, tokens, model.hidden_size, model.ffn_hidden_size)
    of_tokens = 0.0
    if layout.sequence_parallel:
        of_tokens = volume_of_divided_tokens(layout.tp_size, tokens, model.hidden_size, model.num_layers)
    return steps * (model.num_layers * each + of_tokens)


def _fastest(planner: Planner, placement: PlacementName | None) -> PricedLayout | None:
    """The fastest layout with tensor groups of a placement; None: without any."""
    forced = {**planner.forced, "pp_size": 1}
    if placement is None:
        other = planner.changed(forced={**forced, "tp_size": 1})
    else:
        other = planner.changed(forced={**forced, "placement": placement})
    try:
        found = other.search(sys.maxsize).plans
    except UserError:  # no tensor group of this placement, or no feasible layout
        return None
    divided = [plan for plan in found if (plan.layout.tp_size > 1) == (placement is not None)]
    return SearchResult(divided).best if divided else None


def _experts_line(planner: Planner, layout: ParallelLayout) -> str:
    moe, model = planner.config.model.moe_config(), planner.config.model
    batch, nodes = planner.memory.batch_of(layout), planner.time.nodes
    tokens = max(1, round(batch.real * moe.experts_per_token / moe.num_experts))
    network, device = nodes.links.network, nodes.links.device
    link, sharers = (device, 1) if network is None else (network, nodes.devices_per_node)
    seconds = planner.memory.precision.compute / rate(link, sharers, planner.profile)

    def said(elements: float) -> str:
        return f"{elements:,.0f} ({elements * seconds * 1e3:.2g} ms)"

    sizes = (_RANKS, tokens, model.hidden_size, model.ffn_hidden_size)
    divided = ", ".join(f"{name} {said(volume_of_pair(name, *sizes))}" for name in PLACEMENTS)
    return (
        "- Divided matrices (m6.parallel.tensor): of experts the ranks of a group divide the tokens, and only groups "
        f"of the run's own JSON are priced. If they divided the matrices of experts, too, each of {_RANKS} ranks would "
        f"receive {divided} elements for the {tokens} tokens of an expert in a micro-batch; with ep_size {_RANKS} it "
        f"is {said(volume_of_expert(_RANKS, tokens, model.hidden_size))}."
    )


_NUM_GRAINS = 16  # a slice is a multiple of 1/16 of the row


def alternatives(planner: Planner, result: SearchResult) -> list[str]:
    """Markdown items, one for each alternative to the best plan; empty on a single device."""
    lines: list[str] = []
    best = result.best
    if planner.cluster.num_devices > 1:
        other = result.fastest(pipeline=best.layout.pp_size == 1)
        lines.append("- Pipelines: none runs and fits." if other is None else _comparison(best, other))
        pipeline = result.fastest(pipeline=True)
        if pipeline is not None and planner.config.m6.gradient_delay is None:  # the delay allows no slices
            lines += [async_line(planner, best, pipeline), _slice_line(planner, pipeline)]
        lines.append(tensor_line(planner, best))
    if planner.cluster.is_mixed:
        lines.append(_share_line(planner, best))
    return lines


def _comparison(best: PricedLayout, other: PricedLayout) -> str:
    ratio = other.time.total / best.time.total - 1
    which = "without one" if best.layout.pp_size > 1 else "with one"
    pipeline = best if best.layout.pp_size > 1 else other
    return (
        f"- Pipelines (m6.parallel.pipeline): the fastest layout {which}, {other.layout}, takes "
        f"{other.time.total:.4g} s a step ({ratio:+.1%}) and {format_gb(other.footprint.peak)}. Ranks of the pipeline "
        f"wait {pipeline.time.bubble / pipeline.time.total:.1%} of a step for each other."
    )


def _slices_refusal(planner: Planner) -> str:
    """The settings of the run that exclude slices; empty if there are none."""
    config, pipeline = planner.config, PipelineSettings(num_ranks=2, schedule=ONE_STAGE, slices="auto")
    sliced = config.m6.model_copy(update={"parallel": ParallelSettings(pipeline=pipeline)})
    found = [each.reason for each in refusals(Run(sliced, config.deepspeed, config.model)) if SLICES in each.pair]
    try:
        check_slices("auto", sliced)
    except UserError as error:
        found.append(str(error))
    return "; ".join(found)


def _slice_line(planner: Planner, found: PricedLayout) -> str:
    """Compares slices of rows, in their schedule, with the fastest pipeline."""
    plain = planner.evaluate(replace(found.layout, schedule=ONE_STAGE, cut=()))
    micro_batches = found.layout.accumulation(planner.config.deepspeed.train_batch_size)
    text = f"- Token slices (TeraPipe, Seq1F1B) with {micro_batches} micro-batches in a step"
    if refusal := _slices_refusal(planner):
        return f"{text}: {refusal}."
    if isinstance(plain, Rejection):
        return f'{text}: "schedule": "{ONE_STAGE}", which runs them: {plain.reason}.'
    length = planner.config.m6.data.sequence_length
    whole = (plain.time.compute + plain.time.exchange) / micro_batches
    # Every slice launches all operators again.
    launch = plain.time.launch / micro_batches
    work = slice_work(planner.config.model, plain.layout.micro_batch_size, plain.layout.ep_size)
    unit = (whole - launch) / work(length, 0)
    grain = max(1, length // _NUM_GRAINS)
    cuts, seconds = slice_tokens(
        length,
        range(grain, length, grain),
        1 + plain.time.bubble / whole,  # stages, in units of the slowest one
        micro_batches,
        lambda size, before: launch + unit * work(size, before),
    )
    slices = len(cuts) + 1
    change = (plain.time.total - micro_batches * whole - plain.time.bubble + seconds) / found.time.total - 1
    if not cuts or change >= 0:
        return f"{text}: rows that may be cut anywhere would not be faster than the fastest pipeline."
    held = (plain.layout.pp_size + slices - 1) / slices
    return (
        f'{text}: with "schedule": "{ONE_STAGE}", "slices": {slices} rows that may be cut anywhere, such as those of '
        f"language modelling, would take {change:+.1%} of the time of the fastest pipeline, with activations of "
        f"{held:.3g} micro-batches on its first rank. Pictures and sources cannot be cut."
    )


def _share_line(planner: Planner, best: PricedLayout) -> str:
    """Compares Whale's shares of the global batch with equal ones, in a layout without a pipeline if the plan has equal
    ones: a pipeline gives slow devices fewer layers instead."""
    own, text = best.layout, "- Unequal shares (m6.parallel.shares)"
    other = replace(own, shares=()) if own.shares else planner.time.balanced(replace(own, pp_size=1, cut=()))
    if other.pp_size < own.pp_size:
        text += " without a pipeline"
    judged = planner.evaluate(other)
    if isinstance(judged, Rejection):
        return f"{text}: {judged.layout}: {judged.reason}."
    if not own.shares and not other.shares:
        return f"{text}: equal ones are the best."
    which = list(other.shares) or "equal ones"
    return f"{text}: {which} change the time of a step by {judged.time.total / best.time.total - 1:+.1%}."
