"""What ``m6.parallel.tensor`` would make of a plan, and why the search does not visit it for experts."""

from __future__ import annotations

import sys

from m6.architecture.received import (
    PLACEMENTS,
    PlacementName,
    received_by_attention,
    received_by_expert,
    received_by_feed_forward,
    received_by_pair,
)
from m6.errors import UserError
from m6.planning.cost.layout import ParallelLayout
from m6.planning.machine.collectives import rate
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout, SearchResult

_RANKS = 64
"""The fewest ranks that are a square and a cube."""


def tensor_line(planner: Planner, best: PricedLayout) -> str:
    """A Markdown item: the fastest layout of each placement against the plan; for experts what a rank would receive."""
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
    """Elements that a rank receives in a step for the matrices of all layers, without those of recomputation."""
    model, batch = planner.config.model, planner.memory.batch_of(layout)
    tokens, steps = batch.rows * batch.sequence_length, layout.accumulation(planner.config.deepspeed.train_batch_size)
    assert layout.placement != "megatron"
    each = received_by_attention(layout.tp_size, tokens, model.hidden_size)
    each += received_by_feed_forward(layout.placement, layout.tp_size, tokens, model.hidden_size, model.ffn_hidden_size)
    return model.num_layers * steps * each


def _fastest(planner: Planner, placement: PlacementName | None) -> PricedLayout | None:
    """The fastest layout with tensor groups of a placement; None: without any."""
    forced = {**planner.forced, "pp_size": 1}
    if placement is None:
        other = planner.changed(forced={**forced, "tp_size": 1})
    else:
        other = planner.changed(forced={**forced, "placement": placement})
    try:
        found = other.search(sys.maxsize).plans
    except UserError:  # no tensor group of this placement, or no layout that the code can run
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
    divided = ", ".join(f"{name} {said(received_by_pair(name, *sizes))}" for name in PLACEMENTS)
    return (
        f"- Divided matrices (m6.parallel.tensor; not for experts, which ep_size divides already): for the {tokens} "
        f"tokens of an expert in a micro-batch each of {_RANKS} ranks would receive {divided} elements; with ep_size "
        f"{_RANKS} it is {said(received_by_expert(_RANKS, tokens, model.hidden_size))}."
    )
