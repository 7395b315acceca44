"""The price of compressed gradients: the tensors of the real model, its bytes, and the verdict of a plan."""

from pathlib import Path

import pytest
import torch

from m6.config.communication import CommunicationSettings
from m6.config.run import RunConfig, load_config
from m6.model.modeling import M6ForConditionalGeneration
from m6.planning.cost.folding import fold, gradient_tensors
from m6.planning.cost.gradient_bytes import messages
from m6.planning.cost.reduction_time import all_replicas
from m6.planning.machine.cluster import load_cluster
from m6.planning.machine.collectives import collective_s
from m6.planning.search.compression import compression_line
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout
from m6.training.reduction.reducer import gradient_tensor
from tests.fixtures.plans import CONFIGS

TOP_K = CommunicationSettings(gradients="top_k", density=0.001)


def planner(network_bytes_per_s: float, *overrides: str, name: str = "m6_base") -> Planner:
    cluster = load_cluster(Path("a100_80g_x128")).first(32)
    nodes = cluster.nodes[0]
    network = nodes.links.network.model_copy(update={"bandwidth_bytes_per_s": network_bytes_per_s})
    links = nodes.links.model_copy(update={"network": network})
    slow = cluster.model_copy(update={"nodes": [nodes.model_copy(update={"links": links})]})
    return Planner(load_config(CONFIGS / f"{name}.json", overrides), slow)


def best_of(subject: Planner) -> PricedLayout:
    return subject.changed(forced={"pp_size": 1}).search().best  # in a pipeline nothing may be compressed


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.json", overrides)


@pytest.mark.parametrize("name", ["m6_base", "m6_smoke"])
def test_the_tensors_are_those_of_the_model(name: str):
    run = config(name)
    found = gradient_tensors(fold(run.model), with_experts=True)
    with torch.device("meta"):
        model = M6ForConditionalGeneration(run.model)
    expected = [gradient_tensor(key, each) for key, each in model.named_parameters() if each.requires_grad]

    def order(tensor: object) -> str:
        return repr(tensor)

    vectors = {tensor.shape for tensor in found if len(tensor.shape) == 1}
    assert vectors == {tensor.shape for tensor in expected if len(tensor.shape) == 1}
    matrices = [sorted((each for each in side if len(each.shape) > 1), key=order) for side in (found, expected)]
    assert matrices[0] == matrices[1]
    assert sum(each.numel for each in found) == sum(each.numel for each in expected)


def test_gradients_on_a_slow_network_take_the_time_of_their_messages():
    subject = planner(1.25e8)  # 1 Gb/s
    layout, reduction, nodes = best_of(subject).layout, subject.time.reduction, subject.time.nodes
    found = messages(gradient_tensors(subject.memory.model, layout.ep_size == 1), TOP_K, 0.001, layout.dp_size)
    group = all_replicas(layout, nodes)
    sent = collective_s("all_reduce", found.all_reduced, group, nodes, subject.profile)
    sent += collective_s("all_gather", found.gathered * layout.dp_size, group, nodes, subject.profile)
    seconds = reduction.gradients(layout, 1, TOP_K)
    assert sent < seconds < 1.1 * sent  # and a little for choosing and copying
    assert seconds < 0.5 * reduction.gradients(layout, 1, CommunicationSettings())


def test_a_run_with_the_section_is_priced_with_it():
    slow, stage = 1.25e8, "zero_optimization.stage=1"
    overrides = (stage, "m6.communication.gradients=top_k", "m6.communication.density=0.001")
    plain, sparse = planner(slow), planner(slow, *overrides)
    layout = best_of(sparse).layout
    assert layout.zero_stage <= 1
    saved = plain.time(layout).reduction - sparse.time(layout).reduction
    gradients = [plain.time.reduction.gradients(layout, 1, each) for each in (CommunicationSettings(), TOP_K)]
    assert saved == pytest.approx(gradients[0] - gradients[1], rel=1e-6)
    assert compression_line(sparse, best_of(sparse)) == ""


def test_the_verdict():
    fast, slow = planner(2.5e10, "train_batch_size=2048"), planner(1.25e8)
    assert "are worth nothing: at most" in compression_line(fast, best_of(fast))
    line = compression_line(slow, best_of(slow))
    assert "Fewer bytes (m6.communication) would shorten it by" in line
    assert "worth nothing" not in line
