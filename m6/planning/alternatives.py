"""What the engine does not do, priced beside a plan: pipelines, token slices, delayed gradients, unequal shares.

Each line says which rule forbids it, so that a reader sees what lifting the rule would bring.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from m6.errors import UserError
from m6.planning.cluster import Cluster
from m6.planning.folding import Kind
from m6.planning.layout import DIMENSIONS, Layout
from m6.planning.partition import delayed_step_s, partition_layers, share_rows, slice_tokens
from m6.planning.rules import RULES
from m6.planning.search import Plan, Planner, giga, would_fit

_GRAINS = 16


def alternatives(planner: Planner, best: Plan) -> list[str]:
    """One line each, as Markdown items; empty where there is nothing to compare."""
    lines: list[str] = []
    pipeline = best_pipeline(planner, best)
    if pipeline is not None:
        lines = _pipeline_lines(planner, best, pipeline)
    elif planner.cluster.num_devices > 1:
        reason = _reason("pipeline")
        lines = [f"- Pipeline stages ({reason}): no number of stages divides layers and devices and fits."]
    if planner.cluster.is_mixed:
        lines.append(_share_line(planner, best))
    return lines


def best_pipeline(planner: Planner, best: Plan) -> Plan | None:
    """The fastest layout of two or more stages that fits and differs from ``best`` in ranks and micro-batch alone."""
    free = ("pp_size", "ep_size", "micro_batch_size")
    forced = {name: getattr(best.layout, name) for name in DIMENSIONS if name not in free}
    return would_fit(planner.changed(forced=forced), {"pipeline"}, {}, lambda layout: layout.pp_size > 1)


def cut(planner: Planner, layout: Layout) -> tuple[list[int], float, float]:
    """The layers, embeddings first and head last, cut by BaPipe under the device's memory.

    A layer is taken to need memory by its share of the parameters, of what the fullest of equal stages needs.

    Returns:
        How many of them each stage has, and the seconds of a micro-batch in the slowest stage of this and of an equal
        cut of the layers.

    Raises:
        UserError: no cut fits.
    """
    times, stages, model = planner.time.layer_s(layout), layout.pp_size, planner.memory.model
    numels = {block.kind: block.numel for block, count, _ in model.blocks if count}
    layers: list[Kind] = [
        "sparse" if model.config.is_moe_layer(layer) else "dense" for layer in range(model.config.num_layers)
    ]
    items = [numels["embeddings"], *(numels[kind] for kind in layers), numels["embeddings"]]  # the head is tied to them
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


def _pipeline_lines(planner: Planner, best: Plan, found: Plan) -> list[str]:
    """The best pipeline with its cut, without its flush, and with slices of rows."""
    ratio = found.time.total / best.time.total - 1
    line = (
        f"- Pipeline stages ({_reason('pipeline')}): {found.layout} would take {found.time.total:.4g} s a step "
        f"({ratio:+.1%}) and {giga(found.footprint.peak)}"
    )
    try:
        sizes, slowest, equal = cut(planner, found.layout)
    except UserError as error:
        return [f"{line}; {error}."]
    steps, stages = found.layout.accumulation(planner.config.deepspeed.train_batch_size), found.layout.pp_size
    flushed, delayed = delayed_step_s(slowest, steps, stages)
    return [
        f"{line}; embeddings, layers and head are best cut into {', '.join(map(str, sizes))} (BaPipe), whose slowest "
        f"stage takes {slowest / equal - 1:+.1%} against an equal number of layers.",
        f"- Gradients one step late (PipeDream-2BW; no engine here): computing takes {delayed / flushed - 1:+.1%} "
        f"without the flush between steps, for a second copy of the weights, {giga(found.footprint.weights)} a rank.",
        _slice_line(planner, found),
    ]


def _slice_line(planner: Planner, found: Plan) -> str:
    """Of one row alone in the pipeline, where slices can help."""
    layout = replace(found.layout, micro_batch_size=1)
    length, stages = planner.config.m6.data.sequence_length, layout.pp_size
    row = sum(planner.time.layer_s(layout)) / stages
    # What launching costs, every slice costs anew.
    launch = planner.time(layout).launch / layout.accumulation(planner.config.deepspeed.train_batch_size)
    width = planner.config.model.hidden_size
    # For a token and of width FLOPs, a layer's products cost 24 width and 4 for every token before it.
    linear = 24.0 * width
    unit = (row - launch) / (length * (linear + 2.0 * length))
    grain = max(1, length // _GRAINS)
    slices, seconds = slice_tokens(
        grain * _GRAINS, stages, lambda size, before: launch + unit * size * (linear + 4.0 * (before + size / 2)), grain
    )
    whole = row * stages
    return (
        f"- Token slices (TeraPipe; M6 reads pictures and sources in both directions, so they may not be cut): a row "
        f"that is all target would pass {stages} stages in {seconds / whole:.0%} of the time as slices of "
        f"{', '.join(map(str, slices))} tokens."
    )


def _share_line(planner: Planner, best: Plan) -> str:
    """Whale's shares of the global batch, against equal ones."""
    rows, speeds, capacities = planner.config.deepspeed.train_batch_size, [], []
    for kind in planner.cluster.nodes:
        alone = planner.changed(cluster=Cluster(name=kind.device.name, nodes=[kind]))
        fits = alone.shortfall(best.layout, best.footprint) is None
        speeds += [best.layout.micro_batch_size / sum(alone.time.layer_s(best.layout))] * kind.num_devices
        capacities += [rows if fits else 0] * kind.num_devices
    shares = share_rows(rows, speeds, capacities)
    slowest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
    equal = rows / len(speeds) / min(speeds)
    named: dict[str, int] = {}
    first = 0
    for kind in planner.cluster.nodes:
        named[kind.device.name] = shares[first]
        first += kind.num_devices
    text = ", ".join(f"{share} on {name}" for name, share in named.items())
    return (
        f"- Unequal shares (Whale; the trainer gives every rank as many): {text} of {rows} rows would take "
        f"{slowest / equal - 1:+.1%} of the time to compute."
    )


def _reason(name: str) -> str:
    return f'refused by "{name}": {next(rule.reason for rule in RULES if rule.name == name)}'
