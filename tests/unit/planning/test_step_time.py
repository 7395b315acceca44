"""Step times against slow sums, and their reactions to changes of layout and machine."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from m6.config.run import RunConfig, load_config
from m6.planning.cost.folding import fold
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.step_time import TimeModel
from m6.planning.cost.work import work_of
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.machine.profile import Profile
from m6.planning.search.configuration import layout_of

CONFIGS = Path(__file__).parents[3] / "configs"

PERFECT = Profile(bandwidth_efficiency=1.0, link_efficiency=1.0, matmul_efficiency=1.0, kernel_s=0.0)


def a100(num_devices: int = 128) -> Cluster:
    return load_cluster(Path("a100_80g_x128")).first(num_devices)


def model(config: RunConfig, cluster: Cluster, profile: Profile = PERFECT) -> TimeModel:
    return TimeModel(config, cluster, profile, MemoryModel(config, profile))


def test_compute_is_the_sum_over_every_layer():
    config, cluster = load_config(CONFIGS / "m6_100b.json"), a100()
    layout = layout_of(config, 128)
    time = model(config, cluster)
    device = cluster.nodes[0].device
    total = 0.0
    for work, count in work_of(config, fold(config.model), time.memory.batch_of(layout), layout):
        for _ in range(count):  # layer by layer: forward, two products backward, and once more for recomputation
            for product in work.matmuls:
                each = 2.0 * product.m * product.n * product.k * product.count
                width = 4 if product.dtype == "fp32" else 2
                elements = product.m * product.k + product.n * product.k + product.m * product.n - product.unwritten
                moved = elements * width * product.count
                bound = max(each / device.flops(product.dtype), moved / device.memory_bandwidth_bytes_per_s)
                total += bound * (4 if work.recomputed else 3)
    found = time(layout)
    assert found.matmul + found.experts == pytest.approx(total)
    assert time.lower_bound(layout) <= found.total


def test_time_reacts_as_machines_do():
    config, cluster = load_config(CONFIGS / "m6_100b.json"), a100()
    time = model(config, cluster, Profile())
    base = ParallelLayout(128, 64, zero_stage=2, micro_batch_size=8, checkpointing=True)
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
    store, numel = time.memory.expert_store(layout), 10240 // 512 * 2 * 1024 * 9984 * 48
    assert 0 < time(layout).host < time.host.store_update_s(numel, store), "a forward pass hides a part of the update"
    slow = cluster.nodes[0].links.host.model_copy(update={"bandwidth_bytes_per_s": 1e8})  # type: ignore[union-attr]
    links = cluster.nodes[0].links.model_copy(update={"host": slow})
    starved = Cluster(name="starved", nodes=[cluster.nodes[0].model_copy(update={"links": links})])
    found = model(config, starved, Profile())(layout)
    # The weights twice, and gradients beside the second time.
    assert found.host == pytest.approx(2 * 2 * numel / (1e8 * 0.8) - found.compute - found.exchange)


def test_more_ranks_than_cores_share_them():
    config = load_config(CONFIGS / "m6_cpu.json")
    laptop = load_cluster(Path("cpu_laptop"))
    crowded = laptop.model_copy(update={"nodes": [laptop.nodes[0].model_copy(update={"devices_per_node": 4})]})
    layout = ParallelLayout(2, micro_batch_size=16)
    assert model(config, crowded)(layout).matmul == pytest.approx(2 * model(config, laptop)(layout).matmul)


def test_factors_scale_their_parts():
    config, cluster = load_config(CONFIGS / "m6_100b.json"), a100()
    layout = layout_of(config, 128)
    base = model(config, cluster, Profile())(layout)
    scaled = model(config, cluster, Profile(factors={"exchange": 2.0, "experts": 3.0}))(layout)
    assert (scaled.exchange, scaled.experts) == pytest.approx((2 * base.exchange, 3 * base.experts))
    assert math.isclose(scaled.matmul, base.matmul)
