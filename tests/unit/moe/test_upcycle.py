"""A layer made of a dense network computes what that computes, whatever the routing."""

import itertools

import pytest
import torch
from torch import nn

from moe import MoEConfig
from moe.upcycle import sum_of_equal_gates, upcycle

HIDDEN, FFN = 32, 48


def dense(x: torch.Tensor, w_in, w_out, b_in, b_out, activation: str) -> torch.Tensor:
    hidden = nn.functional.linear(x, w_in, b_in)
    if activation == "swiglu":
        gate, up = hidden.chunk(2, -1)
        hidden = nn.functional.silu(gate) * up
    else:
        hidden = getattr(nn.functional, activation)(hidden)
    return nn.functional.linear(hidden, w_out, b_out)


def weights(config: MoEConfig) -> list:
    torch.manual_seed(0)
    inner = FFN * (2 if config.activation == "swiglu" else 1)
    shapes = [(inner, HIDDEN), (HIDDEN, FFN), (inner,), (HIDDEN,)]
    return [torch.randn(shape) * 0.2 if config.bias or len(shape) == 2 else None for shape in shapes]


@pytest.mark.parametrize(
    ("gating", "normalize", "prototypes", "top_k"),
    [
        *itertools.product(("softmax", "global_softmax", "sigmoid"), (False, True), (1, 4), (1, 2)),
        ("softmax", False, 2, 4),
    ],
)
@pytest.mark.parametrize(("activation", "bias"), [("gelu", False), ("swiglu", False), ("relu", True)])
def test_equal_to_the_dense_network(gating, normalize, prototypes, top_k, activation, bias) -> None:
    config = MoEConfig(
        num_experts=16,
        num_prototypes=prototypes,
        top_k=top_k,
        gating=gating,
        normalize_gates=normalize,
        activation=activation,
        bias=bias,
    )
    w_in, w_out, b_in, b_out = weights(config)
    layer = upcycle(w_in, w_out, config, b_in, b_out)
    x = torch.randn(256, HIDDEN)
    expected = dense(x, w_in, w_out, b_in, b_out, activation)
    output = layer(x)
    # Gates are off by the logits, of deviation 3e-7 and up to four of them.
    scale = expected.abs().max().item()
    torch.testing.assert_close(output.hidden_states, expected, rtol=0, atol=2e-6 * scale)
    counts = output.stats.expert_counts
    assert (counts > 0).float().mean() > 0.8, "the tokens are spread over the experts"
    output.hidden_states.sum().backward()
    if not (normalize and prototypes * top_k == 1):  # a gate that is always 1 teaches the router nothing
        assert layer.router.weight.grad.abs().max() > 0


@pytest.mark.parametrize("bias", [False, True])
def test_shared_experts_add_nothing_at_first(bias: bool) -> None:
    config = MoEConfig(num_experts=16, num_prototypes=4, num_shared_experts=2, shared_expert_gate=bias, bias=bias)
    own = weights(config)
    layer = upcycle(own[0], own[1], config, own[2], own[3])
    x = torch.randn(64, HIDDEN)
    expected = dense(x, *own, "gelu")
    torch.testing.assert_close(layer(x).hidden_states, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_experts_that_choose_tokens_are_refused() -> None:
    config = MoEConfig(num_experts=4, routing="expert_choice", capacity_factor=2.0, eval_capacity_factor=2.0)
    with pytest.raises(ValueError, match='routing is "expert_choice"; expected "token_choice"'):
        upcycle(torch.zeros(8, 4), torch.zeros(4, 8), config)


def test_scale() -> None:
    assert sum_of_equal_gates(MoEConfig(num_experts=16, num_prototypes=4)) == 4 * 1 / 4
    assert sum_of_equal_gates(MoEConfig(num_experts=16, num_prototypes=2, top_k=2, capacity_factor=0.1)) == 2 * 2 / 8
    assert sum_of_equal_gates(MoEConfig(num_experts=16, gating="sigmoid", top_k=2)) == 1.0
    assert sum_of_equal_gates(MoEConfig(num_experts=16, num_prototypes=4, normalize_gates=True)) == 1.0


def test_types_and_devices_are_those_of_the_dense_network() -> None:
    layer = upcycle(torch.randn(8, 4).bfloat16(), torch.randn(4, 8).bfloat16(), MoEConfig(num_experts=2))
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    assert layer.router.weight.abs().max() > 0


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        ([(8, 4), (4, 8), (8,), (4,)], {}, r"bias is False, but b_in and b_out are \[True, True\] given"),
        ([(8, 4), (4, 8), None, None], {"bias": True}, r"bias is True, but b_in and b_out are \[False, False\] given"),
        ([(8, 5), (4, 8), None, None], {}, r"w_in is \[8, 5\]; expected \[8, 4\]"),
        ([(8, 4), (4, 8), None, None], {"activation": "swiglu"}, r"w_in is \[8, 4\]; expected \[16, 4\]"),
        ([(8, 4), (4, 8), (3,), (4,)], {"bias": True}, r"b_in is \[3\]; expected \[8\]"),
    ],
)
def test_shapes_that_do_not_fit(shapes: list, settings: dict, message: str) -> None:
    w_in, w_out, b_in, b_out = (None if shape is None else torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        upcycle(w_in, w_out, MoEConfig(num_experts=2, **settings), b_in, b_out)
