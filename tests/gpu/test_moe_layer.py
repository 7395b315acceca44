"""The expert layer on a card: against the loop over tokens, against itself in double precision, and without waiting."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe import MoEConfig, MoELayer
from moe.kernels.products import GroupedProducts, LoopProducts, Products
from tests.fixtures.moe_layers import cases, prepared
from tests.fixtures.moe_reference import reference_moe

CONFIG = MoEConfig(num_experts=16, num_prototypes=4, bias=True, aux_loss_weight=0.01)
# The largest norm of an error beside the norm of the result: operands of 24, 11 and 8 bits, and sums of 256 products.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def norm_of_error(found: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


@settings(max_examples=60)
@given(case=cases(), seed=st.integers(0, 10**6))
def test_forward_and_gradients_equal_the_reference(case, seed) -> None:
    """In float64, 1e-9: about 1e6 rounding errors of values near 1. The order of sums on a card is its own."""
    layer, x, mask = prepared(case, seed)
    parameters = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    expected = reference_moe(x, mask, parameters, layer.config, layer.training)

    on_card, x_on_card = copy.deepcopy(layer).cuda(), x.detach().cuda().requires_grad_()
    output = on_card(x_on_card, mask.cuda())
    direction = torch.randn_like(x)
    (output.hidden_states * direction.cuda()).sum().add(output.aux_loss).backward()
    inputs = [x, *layer.parameters()]
    loss = (expected.hidden_states * direction).sum() + expected.aux_loss + sum(0 * each.sum() for each in inputs)
    grads = torch.autograd.grad(loss, inputs)

    close = dict(rtol=1e-9, atol=1e-9, check_device=False)
    torch.testing.assert_close(output.hidden_states, expected.hidden_states, **close)
    torch.testing.assert_close(output.aux_loss, expected.aux_loss, **close)
    for found, grad in zip([x_on_card, *on_card.parameters()], grads, strict=True):
        torch.testing.assert_close(torch.zeros_like(grad) if found.grad is None else found.grad, grad, **close)
    assert output.stats.expert_counts.tolist() == [len(tokens) for tokens in expected.tokens_of_expert]
    assert output.stats.dropped.tolist() == expected.dropped


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_type_is_near_double_precision(dtype: torch.dtype) -> None:
    """On the same rounded weights and inputs, which choose the same experts: the router computes in float32."""
    torch.manual_seed(0)
    layer = MoELayer(64, 256, CONFIG).cuda().to(dtype)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(512, 64, device="cuda", dtype=dtype)
    direction = torch.randn_like(x)
    found: list[list[Tensor]] = []
    for each in (layer, exact):
        own = x.detach().to(each.experts.w_in.dtype).requires_grad_()
        output = each(own)
        (output.hidden_states * direction.to(own.dtype)).sum().add(output.aux_loss).backward()
        grads = [parameter.grad for parameter in each.parameters()]
        assert all(grad is not None for grad in grads)
        found.append([output.hidden_states.detach(), own.grad, *grads])  # type: ignore[list-item]
    assert all(norm_of_error(left, right) < TOLERANCES[dtype] for left, right in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_equal_the_loop(dtype: torch.dtype) -> None:
    """With experts of no rows and of many."""
    torch.manual_seed(0)
    counts = torch.tensor([0, 5, 300, 0, 1, 64], device="cuda")
    left, right = (torch.randn(int(counts.sum()), size, device="cuda", dtype=dtype) for size in (32, 64))
    weight = torch.randn(6, 64, 32, device="cuda", dtype=dtype)
    contestants: list[Products] = [GroupedProducts(counts), LoopProducts(counts, torch.float64)]
    for name, arguments in (
        ("forward", (left, weight)),
        ("input_grad", (right, weight)),
        ("weight_grad", (right, left)),
        ("bias_grad", (left,)),
    ):
        grouped, loop = (getattr(products, name)(*arguments) for products in contestants)
        assert norm_of_error(grouped, loop) < TOLERANCES[dtype], name


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="below compute capability 9.0 PyTorch loops over the experts",
)
def test_a_step_of_the_layer_never_waits_for_the_card() -> None:
    """Without a capacity, whose rule makes the number of rows depend on the data."""
    torch.manual_seed(0)
    layer = MoELayer(64, 256, CONFIG).cuda().bfloat16()
    x = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            output = layer(x)
            (output.hidden_states.sum() + output.aux_loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
