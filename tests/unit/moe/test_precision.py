"""The layer in 16 bits, under autocast and in float64."""

import copy

import pytest
import torch

from moe import MoEConfig, MoELayer


def make_layer(config: MoEConfig, hidden_size: int = 8, ffn_hidden_size: int = 12, dtype=torch.float64) -> MoELayer:
    layer = MoELayer(hidden_size, ffn_hidden_size, config, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():  # large and uneven
            parameter.normal_(std=0.5)
    return layer


@pytest.mark.parametrize("hidden_size", [8, 6])
def test_autocast_and_bfloat16_route_in_float32(hidden_size: int) -> None:
    """bfloat16 has 8 bits: 2 % of the largest value after two matrix products. 6 columns take the loop."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=4, num_prototypes=2)
    layer = make_layer(config, hidden_size, 16, torch.float32)
    x = torch.randn(64, hidden_size).bfloat16().float()
    expected = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.hidden_states.dtype == torch.float32
    assert output.aux_loss.dtype == torch.float32
    assert torch.equal(output.stats.expert_counts, expected.stats.expert_counts)
    tolerance = dict(rtol=0, atol=0.02 * expected.hidden_states.abs().max().item())
    torch.testing.assert_close(output.hidden_states, expected.hidden_states, **tolerance)
    output.hidden_states.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())

    layer = layer.bfloat16()
    output = layer(x.bfloat16())
    assert output.hidden_states.dtype == torch.bfloat16
    assert output.aux_loss.dtype == torch.float32
    expected = layer.float()(x)
    torch.testing.assert_close(output.hidden_states.float(), expected.hidden_states, **tolerance)
    assert torch.equal(output.stats.expert_counts, expected.stats.expert_counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden_size", "ffn_hidden_size"), [(16, 24), (6, 5)])
@pytest.mark.parametrize(
    "changes",
    [{}, {"activation": "swiglu", "bias": True, "num_shared_experts": 1}, {"recompute_activation": True}],
    ids=str,
)
def test_16_bit_forward_and_gradients(dtype: torch.dtype, hidden_size: int, ffn_hidden_size: int, changes) -> None:
    """By whatever way this processor takes, aligned and not; against the same weights and tokens in float64.

    The routers' float32 makes the same choices. Three of the type's roundings of the largest value, and as much again:
    tokens, hidden units and outputs are rounded, and most sums average their errors out.
    """
    torch.manual_seed(0)
    config = MoEConfig(**{"num_experts": 4, "num_prototypes": 2, "capacity_factor": 1.0} | changes)
    layer = make_layer(config, hidden_size, ffn_hidden_size, dtype)
    exact = copy.deepcopy(layer).double()
    x, direction = torch.randn(2, 40, hidden_size).to(dtype)
    results = []
    for each in (layer, exact):
        inputs = x.to(each.router.weight.dtype).requires_grad_()
        output = each(inputs)
        loss = (output.hidden_states * direction).sum() + output.aux_loss
        grads = torch.autograd.grad(loss, [inputs, *each.parameters()])
        results.append([output.hidden_states.detach(), *grads])
        assert all(result.dtype == inputs.dtype for result in results[-1])
    assert torch.equal(layer(x).stats.expert_counts, exact(x.double()).stats.expert_counts)
    for own, expected in zip(*results, strict=True):
        tolerance = 6 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_leaves_float64(autocast: torch.dtype) -> None:
    """As it does in PyTorch's own modules."""
    layer = make_layer(MoEConfig(num_experts=4, num_prototypes=2, bias=True, num_shared_experts=1))
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", autocast, enabled=enabled):
            output = layer(x)
        grads = torch.autograd.grad(output.hidden_states.sin().sum() + output.aux_loss, [x, *layer.parameters()])
        results.append([output.hidden_states, output.aux_loss, *grads])
    for plain, inside in zip(*results, strict=True):
        assert torch.equal(plain, inside)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_in_autocast(autocast: torch.dtype, recompute: bool) -> None:
    """Of float32 weights, against float64: as far off as ``test_16_bit_forward_and_gradients``."""
    torch.manual_seed(0)
    config = MoEConfig(num_experts=4, num_prototypes=2, bias=True, recompute_activation=recompute)
    layer = make_layer(config, 16, 24, torch.float32)
    exact = copy.deepcopy(layer).double()
    x, direction = torch.randn(2, 40, 16)
    results = []
    for each in (layer, exact):
        inputs = x.to(each.router.weight.dtype).requires_grad_()
        with torch.autocast("cpu", autocast):
            output = each(inputs)
        loss = (output.hidden_states * direction).sum() + output.aux_loss
        grads = torch.autograd.grad(loss, [inputs, *each.parameters()])
        results.append([output.hidden_states.detach(), *grads])
        assert all(result.dtype == inputs.dtype for result in results[-1])
    for own, expected in zip(*results, strict=True):
        tolerance = 6 * torch.finfo(autocast).eps * expected.abs().max().item()
        torch.testing.assert_close(own.double(), expected, rtol=0, atol=tolerance)
