"""Every way of exchanging tokens gives what the layer with all experts gives, and sends the bytes that it should.

Tolerance in float32: 1e-6 of a tensor's largest number, or of 1; ranks add up in another order.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from spawn import init_deepspeed, run_distributed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe import MoEConfig, MoELayer, apply_expert_parallelism
from moe.expert_parallel import _make_dispatcher, _make_groups, exchange_steps

HIDDEN = 16


class Case(NamedTuple):
    steps: str
    ep_size: int
    config: MoEConfig


def config(**settings: object) -> MoEConfig:
    return MoEConfig(**({"num_experts": 8, "num_prototypes": 4, "aux_loss_weight": 0.0} | settings))


CASES = [
    Case("prototype 2", 2, config()),
    Case("prototype 2", 2, config(num_prototypes=2, top_k=2)),
    Case("all_to_all 2", 2, config(num_prototypes=1, top_k=3)),
    Case("all_to_all 2", 2, config(exchange="all_to_all")),
    Case("prototype 2", 2, config(capacity_factor=0.5, min_capacity=1)),
    Case("prototype 4", 4, config()),
    Case("prototype 4", 4, config(capacity_factor=0.5, min_capacity=1)),
    Case("all_to_all 4", 4, config(num_prototypes=2)),
    Case("prototype 2, all_to_all 2", 4, config(num_prototypes=2, top_k=2, exchange="prototype")),
    Case("prototype 2, all_to_all 2", 4, config(num_prototypes=2, ranks_per_node=2)),
    Case("prototype 2, prototype 2", 4, config(ranks_per_node=2)),
    Case("node 2, all_to_all 2", 4, config(num_prototypes=1, top_k=3, ranks_per_node=2)),
    Case("node 2, all_to_all 2", 4, config(exchange="all_to_all", ranks_per_node=2)),
    Case("node 2, all_to_all 2", 4, config(num_prototypes=1, top_k=2, capacity_factor=0.7, ranks_per_node=2)),
]


def make_layer(config: MoEConfig) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(HIDDEN, 32, config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    return layer


def split(layer: MoELayer, ep_size: int, equal_tokens: bool = False) -> MoELayer:
    model = nn.ModuleList([copy.deepcopy(layer)])
    apply_expert_parallelism(model, ep_size, equal_tokens)
    return model[0]


def compare(case: Case, layer: MoELayer, whole: MoELayer, num_tokens: list[int], make: Callable[..., Tensor]) -> None:
    """One call with ``num_tokens[rank]`` tokens, forward and gradients, against the layer with all experts."""
    rank = dist.get_rank()
    first = rank // case.ep_size * case.ep_size
    whole.zero_grad()
    layer.zero_grad()
    for other in range(first, first + case.ep_size):
        torch.manual_seed(other)
        x, weight = make(num_tokens[other], HIDDEN), torch.randn(num_tokens[other], HIDDEN)
        reference = x.clone().requires_grad_()
        router_grad = torch.zeros_like(whole.router.weight) if whole.router.weight.grad is None else None
        before = whole.router.weight.grad.clone() if router_grad is None else router_grad
        output = whole(reference)
        (output.hidden_states * weight).sum().backward()
        if other == rank:
            own = x.clone().requires_grad_()
            expected, expected_grad = output, reference.grad
            expected_router_grad = whole.router.weight.grad - before
            own_weight = weight
    output = layer(own)
    (output.hidden_states * own_weight).sum().backward()

    where = f"{case}, {num_tokens}"
    assert_equal(output.hidden_states, expected.hidden_states, where)
    assert_equal(own.grad, expected_grad, where)
    assert_equal(layer.router.weight.grad, expected_router_grad, where)
    assert torch.equal(output.stats.expert_counts, expected.stats.expert_counts)
    for (name, parameter), complete in zip(layer.experts.named_parameters(), whole.experts.parameters(), strict=True):
        share = complete.grad[parameter.first_expert :][: len(parameter)]
        assert share.abs().sum() > 0 or min(num_tokens) < 8, name
        assert_equal(parameter.grad, share, f"{where}, {name}")


def assert_equal(found: Tensor, expected: Tensor, where: str = "") -> None:
    assert found.shape == expected.shape
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * scale, msg=lambda text: f"{where}: {text}")


def check_cases(world_size: int) -> None:
    init_deepspeed()
    for case in CASES:
        if case.ep_size > world_size:
            continue
        steps = exchange_steps(case.config, case.ep_size)
        assert ", ".join(f"{step.kind} {step.size}" for step in steps) == case.steps
        whole = make_layer(case.config)
        layer = split(whole, case.ep_size)
        # Unequal numbers, one rank without any token, all without, equal ones.
        for num_tokens in ([9, 0, 17, 6], [0, 5, 0, 0], [0, 0, 0, 0], [8, 8, 8, 8]):
            compare(case, layer, whole, num_tokens, torch.randn)
        # All tokens choose the same experts; the others have none.
        with torch.no_grad():
            for each in (layer, whole):
                each.router.weight.fill_(-1.0)
                each.router.weight[1 :: case.config.experts_per_prototype] = 1.0
        compare(case, layer, whole, [9, 0, 17, 6], torch.rand)

    check_bytes_and_balance(world_size)
    check_payloads(world_size)
    check_overlap(world_size)
    with pytest.raises(ValueError, match="num_prototypes 3 and ep_size 2 have no common"):
        split(make_layer(config(num_experts=12, num_prototypes=3, exchange="prototype")), 2)
    promised = split(make_layer(config(capacity_factor=0.1, min_capacity=1)), 2, equal_tokens=True)
    with pytest.raises(ValueError, match="equal_tokens was promised, but 16 tokens have 8 pairs; expected 4 each"):
        promised(torch.randn(16, HIDDEN))


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_to_the_layer_with_all_experts(world_size: int) -> None:
    run_distributed(check_cases, world_size, world_size, timeout_s=300)


def forward(layer: MoELayer, x: Tensor) -> tuple[Tensor, int, int]:
    """The output, and the bytes sent within and between nodes by this call."""
    sent = layer.dispatcher.sent_bytes
    within, between = sent.within_nodes, sent.between_nodes
    output = layer(x).hidden_states
    return output, sent.within_nodes - within, sent.between_nodes - between


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
        check_bytes_between_nodes(tokens, row)


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
        for payload in ("same", "bfloat16", "float8"):
            layer = make_layer(config(payload=payload, **settings))
            layer = split(layer, world_size)
            own = x.clone().requires_grad_()
            output, within, between = forward(layer, own)
            output.square().sum().backward()
            results[payload], sizes[payload] = (output.detach(), own.grad), within + between
        expected = x.clone().requires_grad_()
        whole(expected).hidden_states.square().sum().backward()
        # A rounding of up to 2^-8 (2^-4) of each number at every trip, random in sign, with weights near 1.
        for payload, tolerance in (("bfloat16", 0.01), ("float8", 0.1)):
            for found, exact in zip(results[payload], (results["same"][0], expected.grad), strict=True):
                error = (found - exact).norm() / exact.norm()
                assert 0 < error < tolerance, f"{settings} {payload} {error}"
        assert sizes["float8"] < sizes["bfloat16"] < sizes["same"]
        output, *_ = forward(layer, x[:0].requires_grad_())  # no token on any rank
        output.sum().backward()

    # The rows of an all-to-all alone: D numbers of 4 or 2 bytes there and back; D bytes and a scale there.
    base = {}
    for payload in ("same", "bfloat16", "float8"):
        layer = split(make_layer(config(exchange="all_to_all", payload=payload)), world_size)
        _, within, _ = forward(layer, x)
        base[payload] = within - (world_size - 1) * (8 // world_size) * 8
    assert base["bfloat16"] * 2 == base["same"]
    assert base["float8"] * 2 * HIDDEN == base["bfloat16"] * (HIDDEN // 2 + 2 + HIDDEN)

    # In autocast the experts compute in bfloat16 anyway: rounding on the way there changes nothing.
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        same, rounded = (
            split(make_layer(config(payload=payload, exchange="all_to_all")), world_size)(x).hidden_states
            for payload in ("same", "bfloat16")
        )
    assert torch.equal(same, rounded)


def check_overlap(world_size: int) -> None:
    """What runs meanwhile lies between start and end of the exchange, its backward between those of the gradients'."""
    events: list[str] = []
    layer = split(make_layer(config()), world_size)
    a2a = split(make_layer(config(exchange="all_to_all")), world_size)
    torch.manual_seed(0)
    dense = nn.Linear(HIDDEN, HIDDEN)

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            events.append("dense")
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            events.append("dense backward")
            return grad

    class Work:
        def __init__(self, work: dist.Work, name: str) -> None:
            self.work, self.name = work, name

        def wait(self) -> None:
            events.append(f"end {self.name}")
            self.work.wait()

    def watch(name: str) -> Callable[..., Work]:
        collective = getattr(dist, name)

        def started(buffer: Tensor, *arguments: object, **options: object) -> Work:
            label = f"{name} of rows" if buffer.dim() == 2 and buffer.shape[1] == HIDDEN else "other"
            events.append(f"start {label}")
            return Work(collective(buffer, *arguments, **options), label)

        return started

    names = ("all_to_all_single", "all_gather_single", "reduce_scatter_single")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, watch(name))
        for each, there, back in (
            (layer, "all_gather_single", "reduce_scatter_single"),
            (a2a, "all_to_all_single", "all_to_all_single"),
        ):
            x = torch.randn(8, HIDDEN, requires_grad=True)
            routing, _, _ = route_of(each, x)
            events.clear()
            output = each.dispatcher(x, routing, each.experts, meanwhile=lambda x=x: dense(Watched.apply(x)))
            assert in_order(events, f"start {there} of rows", "dense", f"end {there} of rows")
            events.clear()
            output.sum().backward()
            last_start = len(events) - 1 - events[::-1].index(f"start {back} of rows")
            assert events[last_start:].index("dense backward") < events[last_start:].index(f"end {back} of rows")
    with torch.no_grad():
        whole = make_layer(config())
        assert_equal(output, whole(x).hidden_states + dense(x))


def route_of(layer: MoELayer, x: Tensor) -> tuple:
    from moe.routing import route

    return route(layer.router(x), layer.config, True)


def in_order(events: list[str], *expected: str) -> bool:
    remaining = iter(events)
    return all(event in remaining for event in expected)


def check_equal_tokens_wait_for_nothing() -> None:
    """The first of eight ranks, whose collectives move nothing, over tensors without numbers.

    Whatever asks for a number, to size a tensor by it, fails. bfloat16 is the only type of fake grouped_mm.
    """
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    torch.set_default_dtype(torch.bfloat16)
    for changes in ({}, {"ranks_per_node": 2}, {"payload": "float8"}):
        settings = config(num_experts=32, num_prototypes=8, **changes)
        steps = exchange_steps(settings, 8)
        groups = _make_groups(steps, 8)
        with FakeTensorMode():
            layer = MoELayer(64, 128, settings)
            layer.experts.keep_local(0, 4, "ep_size_8")
            x = torch.randn(16, 64, requires_grad=True)
            layer.dispatcher = _make_dispatcher(steps, groups, settings, equal_tokens=True)
            output = layer(x).hidden_states
            output.sum().backward()
            assert output.shape == x.grad.shape == (16, 64)
            layer.dispatcher = _make_dispatcher(steps, groups, settings, equal_tokens=False)
            with pytest.raises(DataDependentOutputException):
                layer(x)


def test_equal_tokens_wait_for_nothing() -> None:
    run_distributed(check_equal_tokens_wait_for_nothing, 1)
