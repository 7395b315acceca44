"""Groups of ranks that divide matrices: the search, prices, memory, and what reports say of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from m6.architecture.received import received_by_attention, received_by_feed_forward
from m6.config.run import RunConfig, load_config, parse_config
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.tensor_time import block_s
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.collectives import RankGroup
from m6.planning.machine.profile import Profile
from m6.planning.search.alternatives import alternatives
from m6.planning.search.configuration import configure, layout_of, parse_forced
from m6.planning.search.planner import Planner
from tests.fixtures.plans import CONFIGS, brute_force, planner


def dense(rows: int, **model: Any) -> RunConfig:
    document = load_config(CONFIGS / "m6_base.json").document
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
    assert found.visited == sum(found.tally.values()), "every layout has a reason"


def test_a_plan_goes_into_the_json_and_back():
    subject = Planner(dense(2), load_cluster(Path("a100_80g_x128")).first(4), forced={"pp_size": 1})
    layout = subject.search().best.layout
    assert layout.tp_size > 1
    written = parse_config(configure(subject.config, layout))
    assert written.tensor is not None
    assert layout_of(written, 4) == layout
    assert "tensor" not in configure(written, ParallelLayout(2, zero_stage=1))["m6"].get("parallel", {})
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
    found = block_s(layout, tokens, hidden, inner, 1, nodes, ring)
    counted = received_by_attention(ranks, tokens, hidden)
    counted += received_by_feed_forward(placement, ranks, tokens, hidden, inner)
    if checkpointing:
        assert counted < found <= 1.5 * counted  # the forward pass again
    else:
        assert found == pytest.approx(counted, rel=1e-12)


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
        assert counts.local == total - matrices + matrices // 4
        width = memory.precision.weights if stage else 4
        assert divided.gradients == pytest.approx(counts.local * width, rel=1e-6)
        if stage == 0:
            assert whole.optimizer_state - divided.optimizer_state == 8 * (matrices - matrices // 4)


def test_reports_say_what_dense_runs_and_experts_would_gain():
    subject = Planner(dense(2), load_cluster(Path("a100_80g_x128")).first(8), forced={"pp_size": 1})
    [line] = [line for line in alternatives(subject, subject.search()) if "Divided" in line]
    assert "whole matrices without a pipeline: none runs and fits" in line
    assert "this plan" in line
    assert re.search(r"3d on 8 ranks with micro-batches of \d+: \+[\d.]+% step time, of which \d+% to receive", line)

    experts = planner("m6_100b", "a100_80g_x128", forced={"micro_batch_size": 8, "zero_stage": 1, "pp_size": 1})
    [line] = [line for line in alternatives(experts, experts.search()) if "Divided" in line]
    numbers = [float(number.replace(",", "")) for number in re.findall(r"([\d,]+) \(", line)]
    one, square, cube, whole = numbers
    assert whole * 64 == pytest.approx(one, rel=1e-3)
    assert min(one, square, cube) > 10 * whole
