"""Prices of what a plan does not have.

What a plan says of host updates that are one step late.

Groups of ranks that divide matrices: the search, prices, memory, and what reports say of them.
"""

import itertools
import math
import operator
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from m6.architecture.communication_volume import (
    volume_of_attention,
    volume_of_divided_tokens,
    volume_of_feed_forward,
)
from m6.config.run import RunConfig, load_config, parse_config
from m6.errors import UserError
from m6.formatting import format_gb
from m6.planning.cost.communication_time import tensor_block_s
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.cost.memory import MemoryModel
from m6.planning.machine.cluster import Cluster, RankGroup, load_cluster
from m6.planning.machine.profile import Profile
from m6.planning.reports import explanation
from m6.planning.search.alternatives import alternatives, async_line, delay_line
from m6.planning.search.configuration import configure, parse_forced
from m6.planning.search.planner import Planner, PricedLayout
from tests.fixtures.plans import CONFIGS, brute_force, planner


def test_what_a_plan_leaves_out_is_priced():
    subject = planner("m6t_100b", "a100_80g_x128", forced={"micro_batch_size": 8, "zero_stage": 1})
    text = "\n".join(alternatives(subject, subject.search()))
    without_slices = 'leave m6.parallel.pipeline.slices out, or use m6.moe.drop_order "causal"'
    for part in ("m6.parallel.pipeline", "PipeDream-2BW", "TeraPipe", without_slices):
        assert part in text
    assert "Whale" not in text


def test_slices_are_advised_only_where_they_win():
    """They cost launches: more than the rest of the wait, except for long rows in the schedule that waits longest."""
    long = "m6.model.max_position_embeddings=8192", "m6.data.sequence_length=8192", "train_batch_size=128"
    advice = []
    for forced in ({"schedule": "1f1b", "pp_size": 8, "checkpointing": True}, {}):
        subject = planner("m6t_100b", "a100_80g_x128", *long, "m6.moe.capacity_factor=null", forced=forced)
        [line] = [line for line in alternatives(subject, subject.search()) if "Token slices" in line]
        advice.append(line)
    assert re.search(
        r'"slices": 2 rows that may be cut anywhere, .* would take -\d+\.\d% of .* 4\.5 micro-batches', advice[0]
    )
    assert "with 2 micro-batches in a step: rows that may be cut anywhere would not be faster" in advice[1]


def test_unequal_devices_take_unequal_shares():
    subject = planner("m6t_base", "a100_v100_mixed", "train_batch_size=512", forced={"pp_size": 1})
    result = subject.search()
    [line] = [line for line in alternatives(subject, result) if "m6.parallel.shares" in line]
    faster, slower = result.best.layout.shares
    assert faster > slower
    assert re.search(r"equal ones change the time of a step by \+\d+\.\d%", line)
    equal = subject.evaluate(replace(result.best.layout, shares=()))
    for told, same in ((explanation(subject, result.best), False), (explanation(subject, equal), True)):
        assert ("get the same share of a batch" in told, "gets its share of a batch" in told) == (same, not same)
    assert configure(subject.config, result.best.layout)["m6"]["parallel"]["shares"] == [faster, slower]
    # Each type of devices ends its passes at its own time, and the step is that of the last one.
    layout = result.best.layout
    fast, slow = (subject.changed(cluster=Cluster(name="alone", nodes=[each])) for each in subject.cluster.nodes)
    seconds = [
        share * (alone.time.compute(layout).compute + alone.time.exchange(layout))
        for share, alone in ((faster, fast), (slower, slow))
    ]
    assert result.best.time.compute + result.best.time.exchange == pytest.approx(max(seconds))


@pytest.mark.parametrize(
    ("forced", "expected"),
    [
        ({"pp_size": 2, "micro_batch_size": 4}, " without a pipeline: equal ones are the best."),
        ({"pp_size": 2, "micro_batch_size": 1}, r" without a pipeline: \[\d, \d\] change the time of a step by [+-]"),
        ({"pp_size": 1, "micro_batch_size": 4}, ": equal ones are the best."),
        ({"pp_size": 1, "shares": (6, 2)}, r": equal ones change the time of a step by \+"),
        ({"pp_size": 2, "shares": (10, 6)}, r": equal ones change the time of a step by -"),
    ],
    ids=str,
)
def test_what_a_plan_says_of_shares(forced: dict[str, Any], expected: str):
    forced = {"zero_stage": 1, "micro_batch_size": 1, "ep_size": 1, "checkpointing": False} | forced
    subject = planner("m6t_base", "a100_v100_mixed", "train_batch_size=16", forced=forced)
    subject = subject.changed(cluster=of_types(2, 2))
    [line] = [line for line in alternatives(subject, subject.search()) if "m6.parallel.shares" in line]
    assert re.fullmatch(rf"- Unequal shares \(m6.parallel.shares\){expected}.*", line)


def with_groups(rows: int, ranks: int, **parallel: Any) -> RunConfig:
    """A run with experts whose matrices ``ranks`` neighbours divide."""
    document = load_config(CONFIGS / "papers" / "m6t_base.json").document
    document["train_batch_size"], document["train_micro_batch_size_per_gpu"] = rows, 1
    document["zero_optimization"] = {"stage": 1}
    document["m6"]["training"]["ep_size"] = 1
    document["m6"]["parallel"] = {"tensor": {"num_ranks": ranks}, **parallel}
    return parse_config(document)


def of_types(*counts: int) -> Cluster:
    """A cluster of so many A100s and V100s."""
    types = load_cluster(Path("a100_v100_mixed")).nodes
    nodes = [
        each.model_copy(update={"count": 1, "devices_per_node": count})
        for each, count in zip(types, counts, strict=True)
    ]
    return Cluster(name="mixed", nodes=nodes)


@pytest.mark.parametrize(
    ("fast", "slow", "ep_size", "tp_size"),
    [(4, 4, 4, 2), (4, 8, 4, 4), (4, 4, 8, 2), (2, 4, 2, 1), (2, 4, 1, 2), (2, 6, 4, 2)],
)
def test_shares_of_tensor_groups_with_experts(fast: int, slow: int, ep_size: int, tp_size: int):
    """Ranks that exchange tokens get equal shares, and no other shares end the passes of a step sooner."""
    rows, subject = 48, Planner(with_groups(48, 2), of_types(fast, slow))
    plain = ParallelLayout(fast + slow, ep_size, tp_size, zero_stage=1, micro_batch_size=1)
    one, other = (sum(subject.time._on(nodes)._passes(plain).values()) for nodes in subject.cluster.nodes)
    of_ranks, size = [one] * fast + [other] * slow, math.lcm(ep_size, tp_size)
    gather_groups = [max(of_ranks[first : first + size]) for first in range(0, fast + slow, size)]
    most = rows * tp_size // size  # micro-batches of a rank if only its group computed
    some = itertools.product(range(1, most), repeat=len(gather_groups) - 1)
    ways = [(*each, most - sum(each)) for each in some if sum(each) < most] or [(most,)]
    best = min(max(map(operator.mul, way, gather_groups)) for way in ways)
    found = subject.time.balanced(plain)
    shares = [share for share in found.batch_split().shares(rows) for _ in range(tp_size)]
    assert max(map(operator.mul, shares, of_ranks)) == pytest.approx(best)
    assert bool(found.shares) == (len(set(gather_groups)) > 1)


def test_a_forced_size_that_divides_nothing_is_refused_on_mixed_devices():
    subject = planner("m6t_base", "a100_v100_mixed", "train_batch_size=512", forced={"ep_size": 256, "pp_size": 1})
    with pytest.raises(UserError, match="ep_size 256 does not divide both 128 data-parallel ranks and 32 experts"):
        subject.search()


LAYOUT = ParallelLayout(
    512, ep_size=512, zero_stage=1, micro_batch_size=8, checkpointing=True, stream_experts=True, ranks_per_node=8
)
LATE = 'm6.gradient_delay={"accept_loss": true}'


def priced(subject: Planner) -> PricedLayout:
    found = subject.evaluate(LAYOUT)
    assert isinstance(found, PricedLayout)
    return found


def streamed_update_s(subject: Planner) -> float:
    """Seconds of the host's update of what the device does not own."""
    [share] = subject.memory.owned_share_of_ranks(LAYOUT)
    numel = (1 - share) * subject.memory.stored_experts(LAYOUT)
    return subject.time.host.store_update_s(numel, subject.memory.expert_store(LAYOUT))


def test_the_host_update_of_m6_10t_runs_beside_the_whole_step():
    at_once, late = (planner("m6_10t", "v100_32g_x512", *changes) for changes in ((), (LATE,)))
    before, after = priced(at_once), priced(late)
    computing = before.time.compute + before.time.exchange
    assert after.time.host == pytest.approx(streamed_update_s(late) - computing)
    forward = before.time.compute / 4 + before.time.exchange / 3
    assert before.time.host == pytest.approx(streamed_update_s(at_once) - forward)
    # One micro-batch a step: the new weights take the place of the gradients. The others wait in fp32.
    experts = [found.footprint.host + found.footprint.owned_experts for found in (before, after)]
    assert experts[0] == experts[1]
    dense = at_once.memory.counts(LAYOUT).local / 512
    assert after.footprint.optimizer_state - before.footprint.optimizer_state == pytest.approx(4 * dense, rel=0.01)
    line = delay_line(at_once, before)
    assert f"{before.time.host:.4g} s" in line
    assert f"the step {after.time.total:.4g} s" in line
    assert delay_line(late, after) == ""


def test_a_plan_prices_the_pipeline_without_a_flush():
    """Its ranks wait for each other once in ten steps; what the configuration refuses is said in its words."""
    half = ("fp16.enabled=false", "bf16.enabled=true")
    forced = {"zero_stage": 1, "ep_size": 64}
    subject, late = (planner("m6t_100b", "a100_80g_x128", *half, *more, forced=forced) for more in ((), (LATE,)))
    result = subject.search(1)
    best, pipeline, found = result.best, result.fastest(pipeline=True), late.search(1).fastest(pipeline=True)
    assert pipeline is not None
    assert found is not None
    line = async_line(subject, best, pipeline)
    price = f"the fastest, {found.layout}, would take {found.time.total:.4g} s a step"
    assert price in line
    assert f"({found.time.total / best.time.total - 1:+.1%}) and {format_gb(found.footprint.peak)}" in line
    assert "with a flush after every 10 steps; the steps that this costs are not priced" in line
    # A run that has the delay says what it changes.
    flushed = subject.time(found.layout)
    assert found.time.bubble < 0.2 * flushed.bubble
    assert f"wait {found.time.bubble:.4g} s of a step for each other, {flushed.bubble:.4g} s with" in delay_line(
        late, found
    )
    fp16 = planner("m6t_100b", "a100_80g_x128", forced=forced)
    assert "fp16 changes the loss scale between two steps" in async_line(fp16, best, pipeline)
    streamed = planner("m6t_1t", "v100_32g_x480")
    layout = ParallelLayout(480, 240, pp_size=2, zero_stage=1, micro_batch_size=4, stream_experts=True)
    judged = streamed.evaluate(layout)
    assert isinstance(judged, PricedLayout)
    assert "m6.offload has one version of the experts" in async_line(streamed, judged, judged)


def test_what_does_not_wait_for_the_host_has_nothing_to_gain():
    subject = planner("m6_10t", "v100_32g_x512")
    pseudo = subject.changed(sharing=subject.config.m6.pseudo_to_real.sharing(48))  # type: ignore[union-attr]
    assert delay_line(pseudo, priced(pseudo)) == ""
    layout = replace(LAYOUT, stream_experts=False)
    assert delay_line(subject, replace(priced(subject), layout=layout)) == ""


def dense(rows: int, **model: Any) -> RunConfig:
    document = load_config(CONFIGS / "papers" / "m6t_base.json").document
    document["train_batch_size"], document["train_micro_batch_size_per_gpu"] = rows, 1
    document["m6"]["training"]["ep_size"] = 1
    document["m6"]["moe"] = None
    document["m6"]["model"] |= {"num_layers": 4, "num_attention_heads": 8, **model}
    return parse_config(document)


@pytest.mark.parametrize(("world", "rows", "memory"), [(4, 2, 80e9), (8, 8, 4e9)])
def test_search_is_brute_force(world: int, rows: int, memory: float):
    """With fewer rows than ranks only divided matrices run; with little memory they may be the only ones that fit."""
    cluster = load_cluster(Path("a100_80g_x128")).first(world)
    device = cluster.nodes[0].device.model_copy(update={"memory_bytes": int(memory)})
    cluster = cluster.model_copy(update={"nodes": [cluster.nodes[0].model_copy(update={"device": device})]})
    subject = Planner(dense(rows), cluster, forced={"pp_size": 1, "offload_optimizer": False, "offload_params": False})
    expected, found = brute_force(subject), subject.search(5)
    expected = [plan for plan in expected if not plan.layout.offload_optimizer and not plan.layout.offload_params]
    assert any(plan.layout.tp_size > 1 for plan in expected)
    assert found.plans[0].time.total == expected[0].time.total
    assert len(subject.search(1 << 30).plans) == len(expected)
    assert found.visited == sum(found.counters.values()), "every layout has a reason"


def test_a_plan_goes_into_the_json_and_back():
    subject = Planner(dense(2), load_cluster(Path("a100_80g_x128")).first(4), forced={"pp_size": 1})
    layout = subject.search().best.layout
    assert layout.tp_size > 1
    written = parse_config(configure(subject.config, layout))
    assert written.tensor is not None
    assert layout_of(written, 4) == layout
    assert "tensor" not in configure(written, ParallelLayout(2, zero_stage=1))["m6"].get("parallel", {})
    divided = replace(layout, placement="1d", sequence_parallel=True)
    with_tokens = parse_config(configure(subject.config, divided))
    assert layout_of(with_tokens, 4) == divided
    again = Planner(with_tokens, subject.cluster, forced={"pp_size": 1, "tp_size": divided.tp_size, "placement": "1d"})
    assert again.search().best.layout.sequence_parallel, "the search keeps it"
    memories = [subject.memory(each).activations for each in (replace(divided, sequence_parallel=False), divided)]
    assert memories[1] < 0.85 * memories[0]
    assert parse_forced(("placement=2d", "tp_size=4")) == {"placement": "2d", "tp_size": 4}


@pytest.mark.parametrize(("placement", "ranks"), [("1d", 4), ("2d", 4), ("3d", 8)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_prices_are_those_of_the_counted_elements(placement: Any, ranks: int, checkpointing: bool):
    """With a second an element that a ring brings, a block takes as many seconds as tests count in running groups."""
    nodes = load_cluster(Path("a100_80g_x128")).nodes[0]
    tokens, hidden, inner = 256, 64, 256

    def ring(kind: str, num_bytes: float, group: RankGroup) -> float:
        return (2 if kind == "all_reduce" else 1) * num_bytes * (group.size - 1) / group.size

    layout = ParallelLayout(ranks, tp_size=ranks, placement=placement, checkpointing=checkpointing)
    found = tensor_block_s(layout, tokens, hidden, inner, 1, nodes, ring)
    counted = volume_of_attention(ranks, tokens, hidden)
    counted += volume_of_feed_forward(placement, ranks, tokens, hidden, inner)
    if checkpointing:
        assert counted < found <= 1.5 * counted  # the forward pass again
    else:
        assert found == pytest.approx(counted, rel=1e-12)
        # In a layer of experts a rank gathers the tokens' outputs, and in the backward pass their gradients.
        of_experts = volume_of_attention(ranks, tokens, hidden) + 2 * tokens * hidden * (ranks - 1) / ranks
        found = tensor_block_s(layout, tokens, hidden, inner, 1, nodes, ring, num_shared=0)
        assert found == pytest.approx(of_experts, rel=1e-12)
    if placement == "1d":
        of_layers = [volume_of_divided_tokens(ranks, tokens, hidden, layers) for layers in (0, 1)]
        of_vectors = 12 * hidden * (ranks - 1) / ranks  # has no price
        divided = tensor_block_s(replace(layout, sequence_parallel=True), tokens, hidden, inner, 1, nodes, ring)
        plain = tensor_block_s(layout, tokens, hidden, inner, 1, nodes, ring)
        assert divided - plain == pytest.approx(of_layers[1] - of_layers[0] - of_vectors, rel=1e-9)


def test_memory_is_that_of_the_parameters():
    """Weights, gradients and states, against parts of a model on the meta device; some biases are counted whole."""
    from m6.model.modeling import M6ForConditionalGeneration

    config = dense(8)
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ("ffn" in name or "attention" in name)
    ]
    matrices = sum(module.weight.numel() for module in linear)
    total = sum(parameter.numel() for parameter in model.parameters())
    memory = MemoryModel(config, Profile())
    for stage in (0, 1):
        whole, divided = (
            memory(ParallelLayout(8, tp_size=size, zero_stage=stage, micro_batch_size=4)) for size in (1, 4)
        )
        assert divided.activations < whole.activations
        counts = memory.counts(ParallelLayout(8)).divided(ParallelLayout(8, tp_size=4))
        rows = config.model.vocab_size - -(-config.model.vocab_size // 4)  # of the token embedding, on other ranks
        elsewhere = matrices - matrices // 4 + rows * config.model.hidden_size
        assert counts.local == total - elsewhere
        width = memory.precision.weights if stage else 4
        assert divided.gradients == pytest.approx(counts.local * width, rel=1e-6)
        if stage == 0:
            assert whole.optimizer_state - divided.optimizer_state == 8 * elsewhere


def test_reports_say_what_dense_runs_and_experts_would_gain():
    subject = Planner(dense(2), load_cluster(Path("a100_80g_x128")).first(8), forced={"pp_size": 1})
    [line] = [line for line in alternatives(subject, subject.search()) if "Divided" in line]
    assert "whole matrices without a pipeline: none runs and fits" in line
    assert "this plan" in line
    assert re.search(r"3d on 8 ranks with micro-batches of \d+: \+[\d.]+% step time, of which \d+% to receive", line)

    experts = planner("m6t_100b", "a100_80g_x128", forced={"micro_batch_size": 8, "zero_stage": 1, "pp_size": 1})
    [line] = [line for line in alternatives(experts, experts.search()) if "Divided" in line]
    numbers = [float(number.replace(",", "")) for number in re.findall(r"([\d,]+) \(", line)]
    one, square, cube, whole = numbers
    assert whole * 64 == pytest.approx(one, rel=1e-3)
    assert min(one, square, cube) > 10 * whole
    assert "of experts the ranks of a group divide the tokens, and only groups of the run's own JSON are priced" in line
