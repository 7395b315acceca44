"""Clipping at stage 0 against PyTorch's, in float64 where a reference is computed by hand."""

import copy
import math

import pytest
import torch
from torch import nn

from m6.training.engine.clipping import clip_gradients


def model_with_gradients(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clipping_is_that_of_pytorch(max_norm: float):
    model = model_with_gradients()
    reference = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    assert clip_gradients(model, max_norm, None) == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)


def test_the_norm_is_that_of_all_gradients_and_zero_does_not_clip():
    model = model_with_gradients(scale=100.0)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in before))
    assert clip_gradients(model, 0.0, None) == pytest.approx(norm, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_parameters_without_a_gradient_do_not_count():
    model = model_with_gradients()
    model[0].weight.grad = None
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert clip_gradients(model, 0.0, None) == pytest.approx(norm, rel=1e-6)
    model.zero_grad(set_to_none=True)
    assert clip_gradients(model, 1.0, None) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_told_and_left_alone(value: float):
    model = model_with_gradients()
    model[2].weight.grad[1, 1] = value
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert not math.isfinite(clip_gradients(model, 1.0, None))
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)
