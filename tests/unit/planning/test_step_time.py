"""The time model: collectives against a replay over every pair of ranks, sums against slow loops, sane reactions."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import RunConfig, load_config
from m6.model.counting import num_parameters
from m6.planning.cluster import Cluster, load_cluster
from m6.planning.collectives import collective_s, neighbours, strided, tier_bytes
from m6.planning.folding import fold
from m6.planning.footprint import MemoryModel, full_row, scale_batch
from m6.planning.layout import Layout, layout_of
from m6.planning.profile import CollectivePoint, MatmulPoint, Profile
from m6.planning.step_time import TimeModel
from m6.planning.work import work_of
from m6.training.reporting.throughput import training_flops

CONFIGS = Path(__file__).parents[3] / "configs"
PERFECT = Profile(bandwidth_efficiency=1.0, matmul_efficiency=1.0, kernel_s=0.0)


def a100(num_devices: int = 128) -> Cluster:
    return load_cluster(Path("a100_80g_x128")).first(num_devices)


def model(config: RunConfig, cluster: Cluster, profile: Profile = PERFECT) -> TimeModel:
    return TimeModel(config, cluster, profile, MemoryModel(config, profile))


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64, 128])
def test_bytes_of_an_all_to_all_over_every_pair(size: int):
    nodes = a100().nodes[0]
    inside = between = 0.0
    for other in range(1, size):  # rank 0 sends to everyone
        if other < nodes.devices_per_node:
            inside += 1000 / size
        else:
            between += 1000 / size
    assert tier_bytes("all_to_all", 1000, neighbours(size, nodes)) == pytest.approx((inside, between))


@pytest.mark.parametrize(("size", "stride"), [(16, 8), (8, 16), (64, 2), (32, 4), (128, 1)])
def test_ranks_of_a_strided_group_that_share_a_node(size: int, stride: int):
    nodes = a100().nodes[0]
    ranks = [index * stride for index in range(size)]
    counts = [len(list(group)) for _, group in itertools.groupby(ranks, lambda rank: rank // nodes.devices_per_node)]
    group = strided(size, stride, nodes)
    assert (group.per_node, group.num_nodes) == (counts[0], len(counts))


def test_all_reduce_between_nodes_moves_each_byte_once_through_the_network():
    nodes = a100().nodes[0]
    everyone, num_bytes = neighbours(128, nodes), 1e9
    network, inside = 200e9, 300e9
    # The ring over 16 nodes moves 2 x 15/16 of the bytes through each node's ports, whichever device holds them.
    expected = 2 * (num_bytes * 15 / 16 / network + num_bytes * 7 / 8 / inside + 7 * 2e-5)
    assert collective_s("all_reduce", num_bytes, everyone, nodes, PERFECT) == pytest.approx(expected)
    assert collective_s("all_gather", num_bytes, everyone, nodes, PERFECT) == pytest.approx(expected / 2)
    assert collective_s("all_reduce", num_bytes, neighbours(1, nodes), nodes, PERFECT) == 0


def test_measured_collectives_come_first():
    points = [
        CollectivePoint(kind="all_reduce", tier="network", ranks=128, num_bytes=b, seconds=1e-3 + b * 1e-9)
        for b in (1 << 10, 1 << 20, 1 << 30)
    ]
    profile = PERFECT.model_copy(update={"collectives": points})
    nodes = a100().nodes[0]
    found = collective_s("all_reduce", 1 << 28, neighbours(128, nodes), nodes, profile)
    assert found == pytest.approx(1e-3 + 2**28 * 1e-9, rel=1e-2)


def test_measured_products_are_met_and_interpolated():
    points = [MatmulPoint(m=s, n=s, k=s, dtype="bf16", flops=f) for s, f in ((64, 1e12), (4096, 1e14))]
    profile = Profile(matmul=points)
    assert profile.attained_flops(1e15, 64, 64, 64, "bf16") == pytest.approx(1e12, rel=1e-3)
    assert 1e12 < profile.attained_flops(1e15, 512, 512, 512, "bf16") < 1e14
    assert profile.attained_flops(1e15, 64, 64, 64, "fp32") == 0.5e15  # nothing measured in this type


SHARED = {"activation": "swiglu", "num_shared_experts": 2, "shared_expert_gate": True}


@pytest.mark.parametrize(
    ("name", "experts"), [("m6_base", {}), ("m6_100b", {}), ("m6_cpu", {}), ("m6_100b", SHARED)], ids=str
)
def test_flops_are_those_of_the_parameters(name: str, experts: dict[str, Any]):
    """Six for each parameter that multiplies a token, and attention, whose kernel computes all pairs."""
    config = load_config(CONFIGS / f"{name}.json")
    config.model.moe = config.model.moe and {**config.model.moe, **experts}
    batch = replace(scale_batch(full_row(config), 8), pictures=0)
    work = work_of(config, fold(config.model), batch, 1)
    flops = sum(3 * block.flops * count for block, count in work)
    tokens = batch.rows * batch.sequence_length
    length, width, layers = batch.sequence_length, config.model.hidden_size, config.model.num_layers
    expected = (
        training_flops(config.model, tokens, batch.targets, 0, length * tokens) + 6.0 * layers * width * length * tokens
    )
    # The formula counts biases and norms as if they multiplied.
    counts = num_parameters(config.model)
    others = 6.0 * tokens * (counts["norms"] + 4 * layers * width)
    assert flops == pytest.approx(expected - others, rel=1e-3)


def test_compute_is_the_sum_over_every_layer():
    config, cluster = load_config(CONFIGS / "m6_100b.json"), a100()
    layout = layout_of(config, 128)
    time = model(config, cluster)
    device = cluster.nodes[0].device
    total = 0.0
    for work, count in work_of(config, fold(config.model), time.memory.batch_of(layout), 128):
        for _ in range(count):  # layer by layer: forward, two products backward, and once more for recomputation
            for product in work.matmuls:
                each = 2.0 * product.m * product.n * product.k * product.count
                width = 4 if product.dtype == "fp32" else 2
                moved = (product.m * product.k + product.n * product.k + product.m * product.n) * width * product.count
                bound = max(each / device.flops(product.dtype), moved / device.memory_bandwidth_bytes_per_s)
                total += bound * (4 if work.recomputed else 3)
    found = time(layout)
    assert found.matmul + found.experts == pytest.approx(total)
    assert time.lower_bound(layout) <= found.total


def test_time_reacts_as_machines_do():
    config, cluster = load_config(CONFIGS / "m6_100b.json"), a100()
    time = model(config, cluster, Profile())
    base = Layout(128, 64, zero_stage=2, micro_batch_size=8, checkpointing=True)
    assert time(replace(base, checkpointing=False)).compute < time(base).compute
    assert time(replace(base, ep_size=8)).exchange < time(base).exchange  # inside a node
    assert time(replace(base, offload_optimizer=True)).host > 0 == time(base).host
    halved = replace(base, micro_batch_size=1)
    assert time(halved).reduction > time(replace(halved, zero_stage=1)).reduction  # stage 2 reduces every time
    assert time(replace(base, pp_size=2)).bubble > 0 == time(base).bubble


def test_streamed_experts_hide_behind_computation_until_they_cannot():
    config = load_config(CONFIGS / "m6_10t.json")
    cluster = load_cluster(Path("v100_32g_x512"))
    layout = replace(layout_of(config, 512), stream_experts=True)
    time = model(config, cluster, Profile())
    assert time(layout).host == 0
    slow = cluster.nodes[0].links.host.model_copy(update={"bandwidth_bytes_per_s": 1e8})  # type: ignore[union-attr]
    links = cluster.nodes[0].links.model_copy(update={"host": slow})
    starved = Cluster(name="starved", nodes=[cluster.nodes[0].model_copy(update={"links": links})])
    found = model(config, starved, Profile())(layout)
    numel = 10240 // 512 * 2 * 1024 * 9984 * 48
    assert found.host == pytest.approx(2 * 2 * numel / (1e8 * 0.8) - found.matmul - found.experts)


def test_more_ranks_than_cores_share_them():
    config = load_config(CONFIGS / "m6_cpu.json")
    laptop = load_cluster(Path("cpu_laptop"))
    crowded = laptop.model_copy(update={"nodes": [laptop.nodes[0].model_copy(update={"devices_per_node": 4})]})
    layout = Layout(2, micro_batch_size=16)
    assert model(config, crowded)(layout).matmul == pytest.approx(2 * model(config, laptop)(layout).matmul)


def test_factors_scale_their_parts():
    config, cluster = load_config(CONFIGS / "m6_100b.json"), a100()
    layout = layout_of(config, 128)
    base = model(config, cluster, Profile())(layout)
    scaled = model(config, cluster, Profile(factors={"exchange": 2.0, "experts": 3.0}))(layout)
    assert (scaled.exchange, scaled.experts) == pytest.approx((2 * base.exchange, 3 * base.experts))
    assert math.isclose(scaled.matmul, base.matmul)
