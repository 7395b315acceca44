"""Deferred gradients of weights: the same numbers, later."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import DeferredLinear, MoEConfig, clear_deferred_gradients, defer_gradients
from moe.routing import Router


def maps(dtype: torch.dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    linear, router = DeferredLinear(6, 8), Router(8, MoEConfig(num_experts=4, router_jitter=0.1))
    nn.init.normal_(router.weight)
    return nn.ModuleList([linear, router]).to(dtype)


def gradients(model: nn.ModuleList, inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)  # of the router's noise
    model.zero_grad()
    inputs = inputs.clone().requires_grad_()
    linear, router = model
    router(linear(inputs).flatten(0, 1)).double().square().sum().backward()
    return [inputs.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_equal_to_the_bit(dtype: torch.dtype, autocast: bool):
    model, inputs = maps(dtype), torch.randn(2, 5, 6, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(model, inputs)
        defer_gradients(model)
        deferred, again = gradients(model, inputs), gradients(model, inputs)
    for found in (deferred, again):  # prepared for one use
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("part", [0, 1], ids=["linear", "router"])
def test_gradients_wait_for_what_was_done_after_they_were_prepared(part: int):
    events: list[str] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            events.append("between")
            return grads[0]

    module = maps(torch.float32)[part]
    module.weight.register_hook(lambda grad: events.append("weight"))
    for prepared in (False, True):
        values = torch.randn(3, module.weight.shape[1], requires_grad=True)
        if prepared:
            defer_gradients(module)
        module(Note.apply(values)).sum().backward()
        assert events == (["between", "weight"] if prepared else ["weight", "between"])
        events.clear()


def test_uses_take_what_was_prepared_in_turn():
    """As two micro-batches do, which prepare a layer one after the other before they use it."""
    linear, (first, second) = DeferredLinear(6, 8), torch.randn(2, 3, 6)
    expected = torch.autograd.grad(linear(first).sum() + 2 * linear(second).square().sum(), linear.weight)
    defer_gradients(linear)
    defer_gradients(linear)
    found = torch.autograd.grad(linear(first).sum() + 2 * linear(second).square().sum(), linear.weight)
    assert torch.equal(found[0], expected[0])


def test_uses_that_never_came_are_forgotten():
    model = maps(torch.float32)
    defer_gradients(model)
    clear_deferred_gradients(model)
    assert all(part.deferred.take(part.weight)[1] is None for part in model)


def test_nothing_is_prepared_where_there_is_no_gradient():
    model = maps(torch.float32)
    with torch.no_grad():
        defer_gradients(model)
    model.requires_grad_(False)
    defer_gradients(model)
    assert all(part.deferred.take(part.weight)[1] is None for part in model)


def test_second_derivatives_are_refused():
    model = maps(torch.float64)
    defer_gradients(model)
    inputs = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model[0](inputs).square().sum(), model[0].weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
