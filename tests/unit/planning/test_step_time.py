"""Step times against slow sums, and their reactions to changes of layout and machine."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from m6.config.run import RunConfig, load_config, parse_config
from m6.planning.cost.folding import fold
from m6.planning.cost.layout import ParallelLayout, layout_of
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.step_time import TimeModel, added_bytes
from m6.planning.cost.work import work_of
from m6.planning.machine.cluster import Cluster, load_cluster
from m6.planning.machine.profile import MatmulPoint, Profile
from m6.runs.data import open_data
from m6.runs.processes import start
from m6.training.engine.build import build_engine
from tests.fixtures.tiny_run import tiny_document

CONFIGS = Path(__file__).parents[3] / "configs"

PERFECT = Profile(bandwidth_efficiency=1.0, link_efficiency=1.0, matmul_efficiency=1.0, kernel_s=0.0)


def a100(num_devices: int = 128) -> Cluster:
    return load_cluster(Path("a100_80g_x128")).first(num_devices)


def model(config: RunConfig, cluster: Cluster, profile: Profile = PERFECT) -> TimeModel:
    return TimeModel(config, cluster, profile, MemoryModel(config, profile))


def test_compute_is_the_sum_over_every_layer():
    config, cluster = load_config(CONFIGS / "papers" / "m6t_100b.json"), a100()
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
                parts = each / device.flops(product.dtype), moved / device.memory_bandwidth_bytes_per_s
                total += math.hypot(*parts) * (4 if work.recomputed else 3)
    found = time(layout)
    assert found.matmul + found.experts == pytest.approx(total)
    assert time.lower_bound(layout) <= found.total


def test_experts_without_a_common_kernel_are_launched_one_by_one():
    """On an H100 there is one in bf16. The two types have the same FLOP/s and bytes."""
    config, cluster = load_config(CONFIGS / "papers" / "m6t_100b.json"), load_cluster(Path("h100_x128"))
    layout, profile = layout_of(config, 128), PERFECT.model_copy(update={"kernel_s": 1e-5})
    time = model(config, cluster, profile).compute
    (work,) = {work for work, _ in time.work(layout) if any(product.grouped for product in work.matmuls)}
    together = replace(next(product for product in work.matmuls if product.grouped), dtype="bf16")
    alone = replace(together, dtype="fp16")
    assert time.matmul_s(alone) == pytest.approx(math.hypot(time.matmul_s(together), together.count * 1e-5))
    single = replace(alone, grouped=False)
    assert time.matmul_s(single) == time.matmul_s(together)


def test_measured_rates_hold_what_bounds_a_product():
    config, cluster = load_config(CONFIGS / "papers" / "m6t_100b.json"), load_cluster(Path("h100_x128"))
    layout = layout_of(config, 128)
    (work,) = {
        work
        for work, _ in model(config, cluster).compute.work(layout)
        if any(product.grouped for product in work.matmuls)
    }
    product = replace(next(product for product in work.matmuls if product.grouped), dtype="fp16")
    point = MatmulPoint(m=product.m, n=product.n, k=product.k, dtype="fp16", count=product.count, flops=1e12)
    bandwidth = cluster.nodes[0].device.memory_bandwidth_bytes_per_s
    for flops, seconds in ((1e12, product.flops / 1e12), (1e30, product.moved_bytes / bandwidth)):
        profile = PERFECT.model_copy(update={"matmul": [point.model_copy(update={"flops": flops})]})
        assert model(config, cluster, profile).compute.matmul_s(product) == pytest.approx(seconds)


def test_time_reacts_as_machines_do():
    config, cluster = load_config(CONFIGS / "papers" / "m6t_100b.json"), a100()
    time = model(config, cluster, Profile())
    base = ParallelLayout(128, 64, zero_stage=2, micro_batch_size=8, checkpointing=True)
    assert time(replace(base, checkpointing=False)).compute < time(base).compute
    assert time(replace(base, ep_size=8)).exchange < time(base).exchange  # inside a node
    assert time(replace(base, offload_optimizer=True)).host > 0 == time(base).host
    halved = replace(base, micro_batch_size=1)
    assert time(halved).reduction > time(replace(halved, zero_stage=1)).reduction  # stage 2 reduces every time
    assert time(replace(base, pp_size=2)).bubble > 0 == time(base).bubble


def test_streamed_experts_hide_behind_computation_until_they_cannot():
    config = load_config(CONFIGS / "papers" / "m6_10t.json")
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


def test_a_measurement_of_pytorchs_optimizer_says_nothing_about_the_stores():
    config, cluster = load_config(CONFIGS / "papers" / "m6_10t.json"), load_cluster(Path("v100_32g_x512"))
    measured = PERFECT.model_copy(update={"host_update_s_per_parameter": {"AdamW": 1.0, "Adafactor": 1.0}})
    sheet, calibrated = (model(config, cluster, profile) for profile in (PERFECT, measured))
    store = sheet.memory.expert_store(replace(layout_of(config, 512), stream_experts=True))
    assert calibrated.host.store_update_s(10**6, store) == sheet.host.store_update_s(10**6, store)
    assert calibrated.host.update_s(10**6, "AdamW") > sheet.host.update_s(10**6, "AdamW"), "DeepSpeed runs PyTorch's"


def test_more_ranks_than_cores_share_them():
    config = load_config(CONFIGS / "m6_cpu.json")
    laptop = load_cluster(Path("cpu_laptop"))
    crowded = laptop.model_copy(update={"nodes": [laptop.nodes[0].model_copy(update={"devices_per_node": 4})]})
    layout = ParallelLayout(2, micro_batch_size=16)
    assert model(config, crowded)(layout).matmul == pytest.approx(2 * model(config, laptop)(layout).matmul)


def test_factors_scale_their_parts():
    config, cluster = load_config(CONFIGS / "papers" / "m6t_100b.json"), a100()
    layout = layout_of(config, 128)
    base = model(config, cluster, Profile())(layout)
    scaled = model(config, cluster, Profile(factors={"exchange": 2.0, "experts": 3.0}))(layout)
    assert (scaled.exchange, scaled.experts) == pytest.approx((2 * base.exchange, 3 * base.experts))
    assert math.isclose(scaled.matmul, base.matmul)


class _Added(TorchDispatchMode):
    """Counts the bytes that sums of gradients read and write. ``sizes`` are those of the parameters."""

    def __init__(self, sizes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.sizes, self.num_bytes = sizes, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        adds = operator in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        if adds and torch._C._current_autograd_node() is not None and tuple(result.shape) in self.sizes:
            self.num_bytes += sum(value.nbytes for value in (*args[:2], result))
        return result


@pytest.mark.parametrize("layers", [1, 3], ids=["a layer", "layers that share"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bytes_of_gradients_that_are_added_up(tmp_path: Path, stage: int, layers: int):
    """Against the operators of an engine's backward passes, one rank, three micro-batches."""
    changes: dict[str, Any] = {"m6__model__num_layers": layers}
    if layers > 1:
        changes["m6__pseudo_to_real"] = {"switch_step": 2}
    document = tiny_document(tmp_path, train_batch_size=6, train_micro_batch_size_per_gpu=2, **changes)
    config = parse_config({**document, "zero_optimization": {"stage": stage}})
    sharing = config.planned_sharing
    engine, data = build_engine(config, start(), sharing), open_data(config)
    parameters = dict(engine.module.named_parameters())
    batches = [data.micro_batch(index) for index in range(3)]
    engine.begin_step(0.0)
    with _Added({tuple(parameter.shape) for parameter in parameters.values()}) as added:
        engine.accumulate(batches, lambda _, output: output.target_losses.sum() + output.aux_loss, range(3))
    engine.release()
    memory = MemoryModel(config, PERFECT, sharing=sharing)
    assert added_bytes(memory, layout_of(config, 1), 3, 0) == pytest.approx(added.num_bytes, rel=0.02)
