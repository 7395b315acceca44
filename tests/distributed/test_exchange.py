"""Every way of exchanging tokens gives what the layer with all experts gives.

The same ranks then count bytes and record what overlaps (exchange_bytes.py, exchange_overlap.py): to start them
takes longer than all checks.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe import MoEConfig, MoELayer
from moe.collectives import Collectives
from moe.exchange_steps import exchange_steps
from moe.expert_parallel import _make_dispatcher, _make_groups
from tests.distributed.exchange_bytes import check_bytes_and_balance, check_payloads
from tests.distributed.exchange_layers import FFN, HIDDEN, assert_equal, config, make_layer, split
from tests.distributed.exchange_overlap import check_order, check_parts
from tests.distributed.spawn import init_deepspeed, run_distributed
from tests.fixtures.moe_reference import expert_numbers


class Case(NamedTuple):
    steps: str
    ep_size: int
    config: MoEConfig


EVERY_PART = {"bias": True, "activation": "swiglu", "num_shared_experts": 2}

CASES = [
    Case("prototype 2", 2, config()),
    Case("prototype 2", 2, config(num_prototypes=2, top_k=2)),
    Case("all_to_all 2", 2, config(num_prototypes=1, top_k=3)),
    Case("all_to_all 2", 2, config(exchange="all_to_all")),
    Case("prototype 2", 2, config(capacity_factor=0.5, min_capacity=1)),
    Case("prototype 4", 4, config()),
    Case("prototype 4", 4, config(capacity_factor=0.5, min_capacity=1, exchange="prototype")),
    Case("all_to_all 4", 4, config(capacity_factor=0.5, min_capacity=1)),
    Case("node 2, all_to_all 2", 4, config(capacity_factor=0.5, min_capacity=1, ranks_per_node=2)),
    Case("all_to_all 4", 4, config(num_prototypes=2)),
    Case("prototype 2, all_to_all 2", 4, config(num_prototypes=2, top_k=2, exchange="prototype")),
    Case("prototype 2, all_to_all 2", 4, config(num_prototypes=2, ranks_per_node=2)),
    Case("prototype 2, prototype 2", 4, config(ranks_per_node=2)),
    Case("node 2, all_to_all 2", 4, config(num_prototypes=1, top_k=3, ranks_per_node=2)),
    Case("node 2, all_to_all 2", 4, config(exchange="all_to_all", ranks_per_node=2)),
    Case("node 2, all_to_all 2", 4, config(num_prototypes=1, top_k=2, capacity_factor=0.7, ranks_per_node=2)),
    Case("all_to_all 4", 4, config(num_prototypes=2, num_groups=2, groups_per_token=2)),
    Case("node 2, all_to_all 2", 4, config(num_prototypes=2, num_groups=2, ranks_per_node=2)),
    Case(
        "node 2, all_to_all 2",
        4,
        config(num_prototypes=2, top_k=2, num_groups=4, groups_per_token=2, ranks_per_node=2, overlap_parts=2),
    ),
    Case("all_to_all 2", 2, config(num_prototypes=1, top_k=3, overlap_parts=2)),
    Case("prototype 2", 2, config(capacity_factor=0.5, min_capacity=1, overlap_parts=3)),
    Case("all_to_all 4", 4, config(num_prototypes=2, overlap_parts=2)),
    Case("prototype 4", 4, config(overlap_parts=2)),
    Case("prototype 2, all_to_all 2", 4, config(num_prototypes=2, ranks_per_node=2, overlap_parts=2)),
    Case("prototype 2, prototype 2", 4, config(ranks_per_node=2, overlap_parts=3)),
    Case("node 2, all_to_all 2", 4, config(num_prototypes=1, top_k=3, ranks_per_node=2, overlap_parts=2)),
    Case(
        "node 2, all_to_all 2",
        4,
        config(num_prototypes=1, top_k=2, capacity_factor=0.7, ranks_per_node=2, overlap_parts=3),
    ),
]
# What routers and experts are set to, whatever the numbers of tokens.
SETTINGS = [
    Case("prototype 2", 2, config(**EVERY_PART, gating="sigmoid", normalize_gates=True)),
    Case("all_to_all 2", 2, config(**EVERY_PART, num_prototypes=1, top_k=3, recompute_activation=True)),
    Case("prototype 2, all_to_all 2", 4, config(**EVERY_PART, num_prototypes=2, top_k=4)),
    Case("prototype 4", 4, config(gating="global_softmax", expert_dropout=0.3)),
    Case("all_to_all 4", 4, config(exchange="all_to_all", expert_dropout=0.3)),
    Case("all_to_all 2", 2, config(**EVERY_PART, num_prototypes=1, top_k=3, overlap_parts=2)),
    Case("prototype 2, all_to_all 2", 4, config(**EVERY_PART, num_prototypes=2, top_k=4, overlap_parts=2)),
    Case("all_to_all 4", 4, config(exchange="all_to_all", expert_dropout=0.3, overlap_parts=2)),
]


def draw_columns(num_rows: int, device: torch.device) -> Tensor:
    """Dropout that is the same in every row, since rows reach the experts in another order than in the whole layer."""
    return (torch.arange(FFN, device=device) % 3 > 0).expand(num_rows, -1)


def everywhere(layer: MoELayer) -> dict[str, nn.Parameter]:
    """The parameters that every rank has, whose gradients are those of its own tokens."""
    return {name: each for name, each in layer.named_parameters() if not name.startswith("experts.")}


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
        before = [0 if each.grad is None else each.grad.clone() for each in everywhere(whole).values()]
        output = whole(reference)
        (output.hidden_states * weight).sum().backward()
        if other == rank:
            own = x.clone().requires_grad_()
            expected, expected_grad = output, reference.grad
            expected_grads = [each.grad - old for each, old in zip(everywhere(whole).values(), before, strict=True)]
            own_weight = weight
    output = layer(own)
    (output.hidden_states * own_weight).sum().backward()

    where = f"{case}, {num_tokens}"
    assert_equal(output.hidden_states, expected.hidden_states, where)
    assert_equal(own.grad, expected_grad, where)
    for (name, parameter), grad in zip(everywhere(layer).items(), expected_grads, strict=True):
        assert_equal(parameter.grad, grad, f"{where}, {name}")
    assert torch.equal(output.stats.expert_counts, expected.stats.expert_counts)
    for (name, parameter), complete in zip(layer.experts.named_parameters(), whole.experts.parameters(), strict=True):
        share = complete.grad[parameter.first_expert :][: len(parameter)]
        assert share.abs().sum() > 0 or min(num_tokens) < 8, name
        assert_equal(parameter.grad, share, f"{where}, {name}")


def check_sums(world_size: int) -> None:
    """256 of one rank and 1 of each other: added in bfloat16 one after the other, the sum would stay at 256."""
    collectives = Collectives(dist.group.WORLD, "same")
    own = 256.0 if dist.get_rank() == 0 else 1.0
    rows = torch.full((2 * world_size, 8), own, dtype=torch.bfloat16)
    expected = torch.full((2, 8), 255.0 + world_size).bfloat16()
    assert torch.equal(collectives.reduce_scatter(rows).wait(), expected)
    gathered_from = rows[:2].clone().requires_grad_()
    collectives.all_gather(gathered_from).wait().backward(rows)
    assert torch.equal(gathered_from.grad, expected)


def check_cases(world_size: int) -> None:
    init_deepspeed()
    unequal, none_somewhere, none, equal = [9, 0, 17, 6], [0, 5, 0, 0], [0, 0, 0, 0], [8, 8, 8, 8]
    for case in CASES + SETTINGS:
        if case.ep_size > world_size:
            continue
        steps = exchange_steps(case.config, case.ep_size)
        assert ", ".join(f"{step.kind} {step.size}" for step in steps) == case.steps
        whole = make_layer(case.config)
        if case.config.expert_dropout:
            whole.experts.draw_dropout = draw_columns
        layer = split(whole, case.ep_size)
        for num_tokens in (unequal, equal) if case in SETTINGS else (unequal, none_somewhere, none, equal):
            compare(case, layer, whole, num_tokens, torch.randn)
        # All tokens choose the same experts; the others have none.
        with torch.no_grad():
            for each in (layer, whole):
                each.router.weight.fill_(-1.0)
                each.router.weight[[numbers[1 % len(numbers)] for numbers in expert_numbers(case.config)]] = 1.0
        compare(case, layer, whole, unequal, torch.rand)

    check_bytes_and_balance(world_size)
    check_payloads(world_size)
    check_sums(world_size)
    check_order(world_size)
    check_parts(world_size)
    with pytest.raises(ValueError, match="num_prototypes 3 and ep_size 2 have no common"):
        split(make_layer(config(num_experts=12, num_prototypes=3, exchange="prototype")), 2)
    dropping = config(capacity_factor=0.1, min_capacity=1, exchange="prototype")
    promised = split(make_layer(dropping), 2, equal_tokens=True)
    with pytest.raises(ValueError, match="equal_tokens was promised, but 16 tokens have 8 pairs; expected 4 each"):
        promised(torch.randn(16, HIDDEN))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equal_to_the_layer_with_all_experts(world_size: int) -> None:
    run_distributed(check_cases, world_size, world_size)


def check_equal_tokens_wait_for_nothing() -> None:
    """The first of eight ranks, whose collectives move nothing, over tensors without numbers.

    Whatever asks for a number, to size a tensor by it, fails. bfloat16 is the only type of fake grouped_mm.
    """
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    torch.set_default_dtype(torch.bfloat16)
    for changes in ({}, {"ranks_per_node": 2}, {"dispatch_dtype": "float8"}, {"overlap_parts": 2}):
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
