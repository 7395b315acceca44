"""The price of compressed gradients: the tensors of the real model, its bytes, and the verdict of a plan.

Exchanges of tokens that computation hides, against the clock and the closed form of the traffic.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.config.communication import CommunicationSettings
from m6.config.run import RunConfig, load_config
from m6.model.modeling import M6ForConditionalGeneration
from m6.planning.cost.communication_time import RoutingTimes, all_replicas
from m6.planning.cost.compute_time import HostTime
from m6.planning.cost.folding import fold, gradient_tensors
from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.memory import MemoryModel
from m6.planning.cost.step_time import TimeModel
from m6.planning.cost.work import RoutedRows
from m6.planning.machine.cluster import collective_s, load_cluster
from m6.planning.machine.profile import Profile
from m6.planning.search.alternatives import compression_line
from m6.planning.search.planner import Planner
from m6.planning.search.results import PricedLayout
from m6.training.reduction.messages import messages
from m6.training.reduction.reducer import gradient_tensor
from moe import MoEConfig
from tests.fixtures.plans import planner

TOP_K = CommunicationSettings(gradients="top_k", density=0.001)


def planner_with_network(network_bytes_per_s: float, *overrides: str, name: str = "m6t_base") -> Planner:
    cluster = load_cluster(Path("a100_80g_x128")).first(32)
    nodes = cluster.nodes[0]
    network = nodes.links.network.model_copy(update={"bandwidth_bytes_per_s": network_bytes_per_s})
    links = nodes.links.model_copy(update={"network": network})
    slow = cluster.model_copy(update={"nodes": [nodes.model_copy(update={"links": links})]})
    return Planner(load_config(Path(name), overrides), slow)


def best_of(subject: Planner) -> PricedLayout:
    return subject.changed(forced={"pp_size": 1}).search().best  # in a pipeline nothing may be compressed


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(Path(name), overrides)


@pytest.mark.parametrize("name", ["m6t_base", "m6_smoke"])
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
    subject = planner_with_network(1.25e8)  # 1 Gb/s
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
    plain, sparse = planner_with_network(slow), planner_with_network(slow, *overrides)
    layout = best_of(sparse).layout
    assert layout.zero_stage <= 1
    saved = plain.time(layout).reduction - sparse.time(layout).reduction
    gradients = [plain.time.reduction.gradients(layout, 1, each) for each in (CommunicationSettings(), TOP_K)]
    assert saved == pytest.approx(gradients[0] - gradients[1], rel=1e-6)
    assert compression_line(sparse, best_of(sparse)) == ""


def test_the_verdict():
    fast, slow = planner_with_network(2.5e10, "train_batch_size=2048"), planner_with_network(1.25e8)
    assert "are worth nothing: at most" in compression_line(fast, best_of(fast))
    line = compression_line(slow, best_of(slow))
    assert "Fewer bytes (m6.communication) would shorten it by" in line
    assert "worth nothing" not in line


NODES = load_cluster(Path("a100_80g_x128")).nodes[0]
ROUTED = RoutedRows(tokens=4096, pairs=8192, to_experts=2048, from_experts=2048)
LAYOUT = ParallelLayout(128, 64, zero_stage=2, micro_batch_size=8, checkpointing=True)


def price(ep_size: int = 8, **settings: Any) -> RoutingTimes:
    moe = MoEConfig(num_experts=64, top_k=2, **settings)
    return RoutingTimes(moe, ep_size, NODES, Profile(), 1.0)


def run(**moe: Any) -> RunConfig:
    changes = {"capacity_rule": '"k"', "dispatch_dtype": '"same"', **moe}
    settings = ["m6.data.sequence_length=512", *(f"m6.moe.{key}={value}" for key, value in changes.items())]
    return load_config(Path("m6t_100b"), tuple(settings))


def model(config: RunConfig, cluster: str = "a100_80g_x128") -> TimeModel:
    return TimeModel(config, load_cluster(Path(cluster)), Profile(), MemoryModel(config, Profile()))


def test_long_experts_hide_all_but_the_first_and_the_last_part():
    """Without latencies half is exposed with two parts; each message costs its latency again."""
    whole = price()(ROUTED, 1.0, 0.0, 3)
    halves = price(overlap_parts=2)(ROUTED, 1.0, 0.0, 3)
    latencies = 1e-3
    assert whole.hidden == pytest.approx(0.0, abs=1e-12)
    assert halves.exposed == pytest.approx(whole.exposed / 2, abs=latencies)
    assert halves.exposed + halves.hidden == pytest.approx(whole.exposed, abs=latencies)
    assert halves.exposed + halves.hidden > whole.exposed


def test_experts_hide_no_more_than_they_take():
    exposed = price()(ROUTED, 1.0, 0.0, 3).exposed
    short = price(overlap_parts=2)(ROUTED, exposed / 100, 0.0, 3)
    # Each half overlaps with an exchange of the other, in the backward pass for twice as long.
    assert short.hidden == pytest.approx(3 * exposed / 100)
    assert price()(ROUTED, 1.0, exposed, 3).hidden > 0  # shared experts


def test_recomputation_is_one_more_forward_pass():
    three, four, five = (price(overlap_parts=2)(ROUTED, 1e-3, 0.0, passes) for passes in (3, 4, 5))
    assert four.exposed - three.exposed == pytest.approx(five.exposed - four.exposed)
    assert four.hidden > three.hidden


def test_interleaving_hides_less_where_they_end_with_each_layer():
    """With one layer recomputation is one more forward pass; with more, each layer exposes a beginning and an end."""
    one, layers = ((ROUTED, 1e-2, 1e-2, number, 2) for number in (1, 6))
    whole, apart = price().interleaved_s(*one), price().interleaved_layers_s(*one)
    forward = apart.exposed - whole.exposed
    assert 0 < forward < whole.exposed
    assert price().interleaved_layers_s(*layers).exposed == pytest.approx(6 * apart.exposed)
    assert price().interleaved_s(*layers).exposed < 6 * whole.exposed / 2


def test_gradients_that_may_wait_hide_exchanges():
    """The exchange takes less time than the concurrent computation of a pass, and more than its experts."""
    exchange = price()(ROUTED, 0.0, 0.0, 3).exposed / 6  # of one way
    sizes = (ROUTED, exchange / 4, 0.75 * exchange, 6, 2)
    at_once, deferred = (price().interleaved_s(*sizes, deferred=share * exchange) for share in (0.0, 0.5))
    assert deferred.exposed < at_once.exposed
    assert deferred.exposed + deferred.hidden == pytest.approx(at_once.exposed + at_once.hidden)


def test_a_cpu_hides_nothing():
    host = NODES.links.model_copy(update={"host": None})
    cpu = NODES.model_copy(update={"links": host})
    moe = MoEConfig(num_experts=64, top_k=2, overlap_parts=2)
    assert RoutingTimes(moe, 8, cpu, Profile(), 1.0)(ROUTED, 1.0, 1.0, 3).hidden == 0.0


def test_a_step_is_shorter_by_what_is_hidden():
    whole, halves = model(run()), model(run(overlap_parts=2))
    assert whole.hidden_s(LAYOUT) == pytest.approx(0.0, abs=1e-12)
    assert halves.hidden_s(LAYOUT) > 0.2 * whole(LAYOUT).exchange
    saved = whole(LAYOUT).exchange - halves(LAYOUT).exchange
    assert 0 < saved < halves.hidden_s(LAYOUT)  # messages of their own
    assert halves(LAYOUT).total < whole(LAYOUT).total
    alone = replace(LAYOUT, ep_size=1)
    assert halves(alone) == whole(alone)  # no exchange, no parts


def test_experts_in_parts_read_their_weights_once_more():
    whole, halves = model(run())(LAYOUT), model(run(overlap_parts=2))(LAYOUT)
    assert whole.experts <= halves.experts < 2 * whole.experts


def test_streamed_experts_send_a_gradient_for_each_part():
    streamed = replace(LAYOUT, stream_experts=True)
    time = model(run(overlap_parts=16))
    store = time.memory.expert_store(streamed)
    assert str(store.gradient_dtype) == "torch.float32"  # several gradients are added up
    host = HostTime(time.nodes.model_copy(update={"devices_per_node": 1}), Profile())  # all of the host's memory
    copy = store.weight_bytes * 10**9 / host.copy_bytes_per_s
    update = host.store_update_s(10**9, store)
    assert update > copy
    for parts in (1, 2, 16):  # nothing hides: the update in the forward pass, gradients in the backward pass
        found = host.streaming(10**9, store, 1, parts, 1, 0.0, 0.0)
        assert found.exposed == pytest.approx(update + parts * copy)
    whole = model(run())
    assert time(streamed).reduction > whole(streamed).reduction


def test_the_faster_exchange_with_checkpointing_is_found_beside_that_without():
    """In one search: with checkpointing, turns hide less of an exchange, and the one between nodes first wins."""
    subject = planner("m6t_100b", "a100_80g_x128")
    layouts = [
        ParallelLayout(128, 64, zero_stage=1, micro_batch_size=4, checkpointing=checkpointing, overlap_micro_batches=2)
        for checkpointing in (False, True)
    ]
    assert [subject.time.exchange.faster(layout).ranks_per_node for layout in layouts] == [0, 8]
