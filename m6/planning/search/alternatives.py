"""Prices of what the search does not choose: pipelines, token slices, delayed gradients, unequal shares of a batch.

A plan's report shows them next to the plan, so that a reader sees what an implementation would gain.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from m6.errors import UserError
from m6.planning.cost.folding import BlockType
from m6.planning.cost.layout import DIMENSIONS, ParallelLayout
from m6.planning.cost.partition import delayed_step_s, partition_layers, share_rows, slice_tokens
from m6.planning.machine.cluster import Cluster
from m6.planning.search.planner import Planner, PricedLayout, format_gb
from m6.planning.search.requirements import fastest_if_lifted

_NUM_GRAINS = 16  # a slice is a multiple of 1/16 of the row
_NO_PIPELINE = "refused: the search does not choose m6.parallel.pipeline"


def unsupported_alternatives(planner: Planner, best: PricedLayout) -> list[str]:
    """Markdown items, one for each alternative to ``best``; empty on a single device."""
    lines: list[str] = []
    pipeline = best_pipeline(planner, best)
    if pipeline is not None:
        lines = _pipeline_lines(planner, best, pipeline)
    elif planner.cluster.num_devices > 1:
        lines = [f"- Pipeline stages ({_NO_PIPELINE}): no number of stages divides layers and devices and fits."]
    if planner.cluster.is_mixed:
        lines.append(_share_line(planner, best))
    return lines


def best_pipeline(planner: Planner, best: PricedLayout) -> PricedLayout | None:
    """The fastest layout with pipeline stages that fits; of ``best`` only ranks, exchange and micro-batch change."""
    free = ("pp_size", "ep_size", "micro_batch_size", "ranks_per_node")
    forced = {name: getattr(best.layout, name) for name in DIMENSIONS if name not in free}
    return fastest_if_lifted(
        planner.changed(forced=forced), {"pipeline parallelism"}, {}, lambda layout: layout.pp_size > 1
    )


def partition_model(planner: Planner, layout: ParallelLayout) -> tuple[list[int], float, float]:
    """Partitions embeddings, layers and head into the layout's pipeline stages by BaPipe, within the device's memory.

    The memory of a layer is estimated from that of the fullest of equal stages, by the layer's share of the parameters.

    Returns:
        The layers of each stage, embeddings and head included; the seconds of a micro-batch in the slowest stage; and
        those with an equal number of layers in each stage.

    Raises:
        UserError: no partition fits.
    """
    times, stages, model = planner.time.layer_s(layout), layout.pp_size, planner.memory.model
    numels = {block.type: block.numel for block, count, _ in model.blocks if count}
    layers: list[BlockType] = [
        "sparse" if model.config.is_moe_layer(layer) else "dense" for layer in range(model.config.num_layers)
    ]
    items = [
        numels["embeddings"],
        *(numels[kind] for kind in layers),
        numels["embeddings"],
    ]  # the head shares their weights
    footprint, nodes = planner.memory(layout), planner.cluster.smallest
    each = (footprint.peak - footprint.process) * stages / sum(items)
    usable = nodes.device.memory_bytes * planner.memory_fraction - footprint.process
    starts, slowest = partition_layers(times, [each * numel for numel in items], [usable] * stages)
    equal = [0, *(1 + len(layers) // stages * stage for stage in range(1, stages)), len(times)]
    return (
        [end - begin for begin, end in itertools.pairwise([*starts, len(times)])],
        slowest,
        max(sum(times[begin:end]) for begin, end in itertools.pairwise(equal)),
    )


def _pipeline_lines(planner: Planner, best: PricedLayout, found: PricedLayout) -> list[str]:
    """The best pipeline with its partition, without its flush, and with sliced rows."""
    ratio = found.time.total / best.time.total - 1
    line = (
        f"- Pipeline stages ({_NO_PIPELINE}): {found.layout} would take {found.time.total:.4g} s a step "
        f"({ratio:+.1%}) and {format_gb(found.footprint.peak)}"
    )
    try:
        sizes, slowest, equal = partition_model(planner, found.layout)
    except UserError as error:
        return [f"{line}; {error}."]
    steps, stages = found.layout.accumulation(planner.config.deepspeed.train_batch_size), found.layout.pp_size
    flushed, delayed = delayed_step_s(slowest, steps, stages)
    return [
        f"{line}; embeddings, layers and head are best cut into {', '.join(map(str, sizes))} (BaPipe), whose slowest "
        f"stage takes {slowest / equal - 1:+.1%} against an equal number of layers.",
        "- Gradients one step late across these stages (PipeDream-2BW; no engine here): computing takes "
        f"{delayed / flushed - 1:+.1%} without the flush between steps, for a second copy of the weights, "
        f"{format_gb(found.footprint.weights)} a rank.",
        _slice_line(planner, found),
    ]


def _slice_line(planner: Planner, found: PricedLayout) -> str:
    """TeraPipe's slices of a single row, where they help most."""
    layout = replace(found.layout, micro_batch_size=1)
    length, stages = planner.config.m6.data.sequence_length, layout.pp_size
    row = sum(planner.time.layer_s(layout)) / stages
    # Every slice launches all operators again.
    launch = planner.time(layout).launch / layout.accumulation(planner.config.deepspeed.train_batch_size)
    width = planner.config.model.hidden_size
    # FLOPs of a layer for one token, divided by the width: 24 x width, and 4 for each token before it.
    linear = 24.0 * width
    unit = (row - launch) / (length * (linear + 2.0 * length))
    grain = max(1, length // _NUM_GRAINS)
    slices, seconds = slice_tokens(
        grain * _NUM_GRAINS,
        stages,
        lambda size, before: launch + unit * size * (linear + 4.0 * (before + size / 2)),
        grain,
    )
    whole = row * stages
    return (
        f"- Token slices (TeraPipe; M6 reads pictures and sources in both directions, so they may not be cut): a row "
        f"that is all target would pass {stages} stages in {seconds / whole:.0%} of the time as slices of "
        f"{', '.join(map(str, slices))} tokens."
    )


def _share_line(planner: Planner, best: PricedLayout) -> str:
    """Whale's shares of the global batch, against equal ones."""
    rows, speeds, capacities = planner.config.deepspeed.train_batch_size, [], []
    for nodes in planner.cluster.nodes:
        alone = planner.changed(cluster=Cluster(name=nodes.device.name, nodes=[nodes]))
        fits = alone.memory_rejection(best.layout, best.footprint) is None
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
