"""The bytes that an exchange sends, against counts by hand, and what rounding them costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe import MoELayer
from moe.collectives import Collectives
from moe.dispatch_dtype import CODECS
from moe.exchange_traffic import StepTraffic, exchange_traffic
from moe.groups import view_prototypes
from tests.distributed.exchange_layers import HIDDEN, assert_equal, config, make_layer, split
from tests.fixtures.moe_reference import every_choice


def forward(layer: MoELayer, x: Tensor) -> tuple[Tensor, int, int]:
    """The output, and the bytes sent within and between nodes by this call."""
    sent = layer.dispatcher.traffic
    within, between = sent.bytes_within_nodes, sent.bytes_between_nodes
    output = layer(x).hidden_states
    return output, sent.bytes_within_nodes - within, sent.bytes_between_nodes - between


def check_bytes_and_balance(world_size: int) -> None:
    """Bytes of a forward pass, against a count by hand; and the rows that each rank computes."""
    tokens, row = 64, HIDDEN * 4
    settings = config(num_experts=4 * world_size, num_prototypes=4)
    for ep_size in {2, world_size}:
        whole = make_layer(settings)
        with torch.no_grad():  # a router that prefers some experts by far
            whole.router.weight += torch.linspace(0, 1, settings.num_experts)[:, None]
        plain = make_layer(config(num_experts=4 * world_size, exchange="all_to_all"))
        plain.load_state_dict(whole.state_dict())
        prototype, promised = split(whole, ep_size), split(whole, ep_size, equal_tokens=True)
        all_to_all = split(plain, ep_size)
        rows: list[int] = []
        for layer in (prototype, promised):
            layer.experts.register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(int(inputs[1].sum())))
        torch.manual_seed(dist.get_rank())
        x = torch.rand(tokens, HIDDEN)
        expected = whole(x)

        others, local_experts = ep_size - 1, settings.num_experts // ep_size
        remote_pairs = tokens * 4 * others // ep_size
        for layer, message in ((prototype, local_experts + 1), (promised, local_experts)):
            output, within, between = forward(layer, x)
            assert_equal(output, expected.hidden_states)
            assert between == 0
            # There and back a row per token and other rank; a gate and a position per pair; the numbers.
            assert within == 2 * others * tokens * row + remote_pairs * (4 + 4) + others * message * 8
        assert rows == [tokens * 4] * 2, "each rank computes as many rows as every other, whatever the router does"

        _, within, _ = forward(all_to_all, x)
        by_rank = expected.stats.expert_counts.view(ep_size, -1).sum(1)
        assert by_rank.tolist() == [tokens * 4 / ep_size] * ep_size  # whole prototypes
        assert within == 2 * remote_pairs * row + others * local_experts * 8
        # Rows by prototypes : rows by pairs = ep_size : Z.
        assert others * tokens * row * 4 == remote_pairs * row * ep_size

    if world_size == 4:
        check_bytes_of_shared_prototypes(tokens, row)
        check_bytes_between_nodes(tokens, row)
        check_closed_form()


def check_bytes_of_shared_prototypes(tokens: int, row: int) -> None:
    """Two ranks share each of two prototypes; all 8 experts compute each token: 5 rows each way against 6."""
    whole = make_layer(config(num_prototypes=2, top_k=4))
    plain = make_layer(config(num_prototypes=2, top_k=4, exchange="all_to_all"))
    x = torch.randn(tokens, HIDDEN)
    output, auto, _ = forward(split(whole, 4), x)
    assert_equal(output, whole(x).hidden_states)
    # A gate and a position for each pair of the other prototype; the numbers of pairs and rows, and those inside.
    assert auto == 2 * 5 * tokens * row + 4 * tokens * (4 + 4) + (4 + 1) * 8 + 2 * 8
    _, all_to_all, _ = forward(split(plain, 4), x)
    assert all_to_all == 2 * 6 * tokens * row + 3 * 2 * 8
    assert auto < all_to_all


def check_bytes_between_nodes(tokens: int, row: int) -> None:
    """Two nodes of two ranks; top-3 over 8 experts, so that a node's two choices of a token cross once."""
    flat = make_layer(config(num_prototypes=1, top_k=3))
    nodes = make_layer(config(num_prototypes=1, top_k=3, ranks_per_node=2))
    torch.manual_seed(dist.get_rank())
    x = torch.randn(tokens, HIDDEN)
    chosen = flat.router(x).flatten(1).topk(3).indices  # [T, 3]
    other_node = chosen // 4 != dist.get_rank() // 2
    output, *sent = forward(split(nodes, 4), x)
    assert_equal(output, flat(x).hidden_states)
    # What a rank sends back is what it was sent, so the sums over ranks are known.
    crossing, pairs, elsewhere = sum_over_ranks(
        other_node.any(1).sum(), other_node.sum(), (chosen // 2 != dist.get_rank()).sum()
    )
    within, between = sum_over_ranks(*map(torch.tensor, sent))
    assert crossing < pairs
    assert between == 2 * crossing * row + pairs * (4 + 4) + 4 * (4 + 1) * 8
    assert within > 0

    _, *sent = forward(split(flat, 4), x)
    within, between = sum_over_ranks(*map(torch.tensor, sent))
    assert between == 0, "nodes are not known, so all counts as within"
    assert within == 2 * elsewhere * row + 4 * 3 * 2 * 8

    # By prototypes a token crosses once for all prototypes of the other node.
    layer = make_layer(config(ranks_per_node=2))
    _, within, between = forward(split(layer, 4, equal_tokens=True), x)
    assert between == 2 * tokens * row + 2 * tokens * (4 + 4) + 4 * 8
    assert within == 2 * (2 * tokens) * row + 2 * tokens * (4 + 4) + 2 * 8


def check_closed_form() -> None:
    """Tokens that choose every set of experts once, on two nodes of two ranks: what is counted is the expectation."""
    for prototypes, experts, top_k, settings in (
        (1, 8, 2, {}),
        (1, 8, 2, {"ranks_per_node": 2}),
        (2, 4, 2, {"ranks_per_node": 2, "exchange": "all_to_all"}),
        (2, 4, 2, {"ranks_per_node": 2}),
        (4, 2, 1, {"ranks_per_node": 2}),
        (3, 4, 1, {"ranks_per_node": 2, "dispatch_dtype": "bfloat16"}),
        (3, 4, 1, {"ranks_per_node": 2, "dispatch_dtype": "float8"}),
        (3, 4, 1, {"ranks_per_node": 2, "dispatch_dtype": "float8_both"}),
        (4, 2, 1, {"dispatch_dtype": "float8_both"}),
        (1, 8, 2, {"overlap_parts": 2}),
        (1, 8, 2, {"overlap_parts": 3, "ranks_per_node": 2}),
        (4, 2, 1, {"overlap_parts": 2, "ranks_per_node": 2}),
        (2, 4, 1, {"num_groups": 2, "ranks_per_node": 2}),
        (2, 4, 2, {"num_groups": 4, "groups_per_token": 2, "ranks_per_node": 2}),
    ):
        whole = config(num_experts=prototypes * experts, num_prototypes=prototypes, top_k=top_k, **settings)
        chosen = torch.tensor(list(every_choice(whole)))  # [C, K]
        scores = view_prototypes(torch.zeros(len(chosen), whole.num_experts).scatter(1, chosen, 1.0), whole)
        layer = split(make_layer(whole), 4)
        layer.router.forward = lambda _, scores=scores: scores.requires_grad_()
        x = torch.randn(len(scores), HIDDEN, requires_grad=True)
        # Without nodes in the configuration the exchange counts all as within.
        ranks_per_node = whole.ranks_per_node or 4
        there, back = (codec.row_bytes(HIDDEN, 4) for codec in CODECS[whole.dispatch_dtype])
        pairs = len(scores) * whole.experts_per_token
        counted = [0, 0, 0, 0]
        with counted_messages() as messages:
            output = layer(x).hidden_states
            for backward in (False, True):
                if backward:
                    output.sum().backward()
                traffic = layer.dispatcher.traffic
                sent = (traffic.bytes_within_nodes, traffic.bytes_between_nodes, *messages)
                now = sum_over_ranks(*map(torch.tensor, sent))
                steps = exchange_traffic(whole, 4, len(scores), pairs, ranks_per_node, backward)
                expected = [sum(tier) for tier in zip(*(sent_in(step, there, back) for step in steps), strict=True)]
                assert [new - old for new, old in zip(now, counted, strict=True)] == [
                    pytest.approx(4 * value, rel=1e-12) for value in expected
                ], f"{whole}, backward {backward}"
                counted = now


def sent_in(step: StepTraffic, there: float, back: float) -> tuple[float, ...]:
    """Bytes within and between nodes, and messages: each collective sends one to every peer."""
    far_peers = step.peers - step.near_peers
    return (*step.num_bytes(there, back), step.collectives * step.near_peers, step.collectives * far_peers)


@contextmanager
def counted_messages() -> Iterator[list[int]]:
    """Counts the messages that this rank sends within and between nodes."""
    messages, count_bytes = [0, 0], Collectives._count

    def count(ranks: Collectives, rows_per_rank: list[int], encoded: Tensor) -> None:
        count_bytes(ranks, rows_per_rank, encoded)
        near_peers = sum(ranks._same_node) - 1
        messages[0] += near_peers
        messages[1] += ranks.size - 1 - near_peers

    with mock.patch.object(Collectives, "_count", count):
        yield messages


def sum_over_ranks(*values: Tensor) -> list[int]:
    total = torch.stack(values)
    dist.all_reduce(total)
    return total.tolist()


def check_payloads(world_size: int) -> None:
    """Rounded rows: the output is off by what the format rounds, and the bytes shrink to its size."""
    rank = dist.get_rank()
    for settings in (
        {},
        {"exchange": "all_to_all"},
        {"num_prototypes": 2, "exchange": "prototype"},
        {"num_prototypes": 1, "top_k": 3, "ranks_per_node": max(1, world_size // 2)},
    ):
        whole = make_layer(config(**settings))
        torch.manual_seed(rank)
        x = torch.randn(32, HIDDEN)
        results, sizes = {}, {}
        for dispatch_dtype in CODECS:
            layer = make_layer(config(dispatch_dtype=dispatch_dtype, **settings))
            layer = split(layer, world_size)
            own = x.clone().requires_grad_()
            output, within, between = forward(layer, own)
            output.square().sum().backward()
            results[dispatch_dtype], sizes[dispatch_dtype] = (output.detach(), own.grad), within + between
        expected = x.clone().requires_grad_()
        whole(expected).hidden_states.square().sum().backward()
        # A rounding of up to 2^-8 (2^-4) of each number in every exchange, random in sign, with weights near 1.
        for dispatch_dtype, tolerance in (("bfloat16", 0.01), ("float8", 0.1), ("float8_both", 0.1)):
            for found, exact in zip(results[dispatch_dtype], (results["same"][0], expected.grad), strict=True):
                error = (found - exact).norm() / exact.norm()
                assert 0 < error < tolerance, f"{settings} {dispatch_dtype} {error}"
        assert sizes["float8_both"] < sizes["float8"] < sizes["bfloat16"] < sizes["same"]
        output, *_ = forward(layer, x[:0].requires_grad_())  # no token on any rank
        output.sum().backward()

    # The rows of an all-to-all alone: D numbers of 4 or 2 bytes there and back; D bytes and a scale there, or both
    # ways.
    base = {}
    for dispatch_dtype in CODECS:
        layer = split(make_layer(config(exchange="all_to_all", dispatch_dtype=dispatch_dtype)), world_size)
        _, within, _ = forward(layer, x)
        base[dispatch_dtype] = within - (world_size - 1) * (8 // world_size) * 8
    assert base["bfloat16"] * 2 == base["same"]
    assert base["float8"] * 2 * HIDDEN == base["bfloat16"] * (HIDDEN // 2 + 2 + HIDDEN)
    assert base["float8_both"] * 2 * HIDDEN == base["bfloat16"] * (HIDDEN + 4)

    # In autocast the experts compute in bfloat16 anyway: rounding on the way there changes nothing.
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        same, rounded = (
            split(make_layer(config(dispatch_dtype=dispatch_dtype, exchange="all_to_all")), world_size)(x).hidden_states
            for dispatch_dtype in ("same", "bfloat16")
        )
    assert torch.equal(same, rounded)
