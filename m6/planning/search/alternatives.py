"""Prices of what a plan does not have: a pipeline, or none, delayed gradients, token slices, divided matrices, unequal
shares of a batch.

A plan's report shows them next to the plan, so that a reader sees what they would gain.
"""

from __future__ import annotations

from dataclasses import replace

from m6.config.combinations import SLICES, Run, refusals
from m6.config.pipeline import ParallelSettings, PipelineSettings
from m6.config.slices import SLICED, check_slices
from m6.errors import UserError
from m6.planning.cost.partition import share_rows, slice_tokens
from m6.planning.cost.slices import slice_work
from m6.planning.machine.cluster import Cluster
from m6.planning.search.delay import flushless_line
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, Rejection, SearchResult, format_gb
from m6.planning.search.tensor_groups import tensor_line

_NUM_GRAINS = 16  # a slice is a multiple of 1/16 of the row


def alternatives(planner: Planner, result: SearchResult) -> list[str]:
    """Markdown items, one for each alternative to the best plan; empty on a single device."""
    lines: list[str] = []
    best = result.best
    if planner.cluster.num_devices > 1:
        other = result.fastest(pipeline=best.layout.pp_size == 1)
        lines.append("- Pipelines: none runs and fits." if other is None else _comparison(best, other))
        pipeline = result.fastest(pipeline=True)
        if pipeline is not None and planner.config.m6.gradient_delay is None:  # which allows no slices
            lines += [flushless_line(planner, best, pipeline), _slice_line(planner, pipeline)]
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
    """What of the run does not go with slices; empty if everything does."""
    config, pipeline = planner.config, PipelineSettings(num_ranks=2, schedule=SLICED, slices="auto")
    sliced = config.m6.model_copy(update={"parallel": ParallelSettings(pipeline=pipeline)})
    found = [each.reason for each in refusals(Run(sliced, config.deepspeed, config.model)) if SLICES in each.pair]
    try:
        check_slices("auto", sliced)
    except UserError as error:
        found.append(str(error))
    return "; ".join(found)


def _slice_line(planner: Planner, found: PricedLayout) -> str:
    """Slices of rows, in the schedule that runs them, against the fastest pipeline."""
    plain = planner.evaluate(replace(found.layout, schedule=SLICED, cut=()))
    micro_batches = found.layout.accumulation(planner.config.deepspeed.train_batch_size)
    text = f"- Token slices (TeraPipe, Seq1F1B) with {micro_batches} micro-batches in a step"
    if refusal := _slices_refusal(planner):
        return f"{text}: {refusal}."
    if isinstance(plain, Rejection):
        return f'{text}: "schedule": "{SLICED}", which runs them: {plain.reason}.'
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
        1 + plain.time.bubble / whole,  # stages that are as slow as the slowest
        micro_batches,
        lambda size, before: launch + unit * work(size, before),
    )
    slices = len(cuts) + 1
    change = (plain.time.total - micro_batches * whole - plain.time.bubble + seconds) / found.time.total - 1
    if not cuts or change >= 0:
        return f"{text}: rows that may be cut anywhere would not be faster than the fastest pipeline."
    held = (plain.layout.pp_size + slices - 1) / slices
    return (
        f'{text}: with "schedule": "{SLICED}", "slices": {slices} rows that may be cut anywhere, such as those of '
        f"language modelling, would take {change:+.1%} of the time of the fastest pipeline, with activations of "
        f"{held:.3g} micro-batches on its first rank. Pictures and sources cannot be cut."
    )


def _share_line(planner: Planner, best: PricedLayout) -> str:
    """Whale's shares of the global batch, against equal ones."""
    rows, speeds, capacities = planner.config.deepspeed.train_batch_size, [], []
    for nodes in planner.cluster.nodes:
        alone = planner.changed(cluster=Cluster(name=nodes.device.name, nodes=[nodes]))
        fits = alone.memory_rejection(replace(best.layout, pp_size=1, cut=())) is None
        speeds += [best.layout.micro_batch_size / sum(alone.time.layer_s(best.layout))] * nodes.num_devices
        # Rows come in micro-batches, so a device that holds one micro-batch can take any number of rows.
        capacities += [rows if fits else 0] * nodes.num_devices
    shares = share_rows(rows, speeds, capacities)
    slowest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    equal = rows / len(speeds) / min(speeds)
    named: dict[str, int] = {}
    first = 0
    for nodes in planner.cluster.nodes:
        named[nodes.device.name] = shares[first]
        first += nodes.num_devices
    text = ", ".join(f"{share} on {name}" for name, share in named.items())
    return (
        f"- Unequal shares (Whale; the trainer gives every rank as many): {text} of {rows} rows would take "
        f"{slowest / equal - 1:+.1%} of the time to compute."
    )
