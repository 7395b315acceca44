"""Clipping at stage 0 against PyTorch's, in float64 where a reference is computed by hand."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from m6.training.engine.norms import PartGroups, Piece, TensorLayout, clip_gradients, norms_of
from m6.training.reporting.noise import GradientNoise


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
    assert clip_gradients(model, max_norm, PartGroups(None, None)) == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)


def test_the_norm_is_that_of_all_gradients_and_zero_does_not_clip():
    model = model_with_gradients(scale=100.0)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in before))
    assert clip_gradients(model, 0.0, PartGroups(None, None)) == pytest.approx(norm, rel=1e-6)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_parameters_without_a_gradient_do_not_count():
    model = model_with_gradients()
    model[0].weight.grad = None
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None))
    assert clip_gradients(model, 0.0, PartGroups(None, None)) == pytest.approx(norm, rel=1e-6)
    model.zero_grad(set_to_none=True)
    assert clip_gradients(model, 1.0, PartGroups(None, None)) == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_told_and_left_alone(value: float):
    model = model_with_gradients()
    model[2].weight.grad[1, 1] = value
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert not math.isfinite(clip_gradients(model, 1.0, PartGroups(None, None)))
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0, equal_nan=True)


LARGE = 30_000_000  # a sum of so many squares in fp32 is 0.2 % too small


@pytest.fixture(scope="module")
def large() -> tuple[torch.Tensor, float]:
    """A gradient of many elements, and its norm in float64."""
    gradient = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
    return gradient, math.sqrt(sum(float(each.double().square().sum()) for each in gradient.split(2**20)))


def test_the_norm_of_a_large_tensor_is_that_of_float64(large: tuple[torch.Tensor, float]):
    """However it is cut, and in each place that measures norms: 1e-9, far above the rounding of fp64."""
    gradient, norm = large
    model = nn.Linear(LARGE // 10_000, 10_000, bias=False, device="meta")
    model.weight = nn.Parameter(torch.zeros_like(gradient).view(10_000, -1))
    model.weight.grad = gradient.clone().view(10_000, -1)
    assert clip_gradients(model, 0.5 * norm, PartGroups(None, None)) == pytest.approx(norm, rel=1e-9)
    assert float(norms_of([model.weight.grad])[0]) == pytest.approx(0.5 * norm, rel=1e-6)  # fp32 gradients
    for parts in (gradient.chunk(2), gradient.split([10, LARGE - 10]), [gradient[:0], gradient]):
        assert float(norms_of(parts).square().sum().sqrt()) == pytest.approx(norm, rel=1e-9)
    layout = TensorLayout([Piece(0, LARGE, 0)], 1, gradient.device)
    assert layout.norms(gradient)[0, 0].item() == pytest.approx(norm, rel=1e-9)
    noise = SimpleNamespace(_squares=torch.zeros((), dtype=torch.float64))
    GradientNoise._add(noise, gradient)
    assert noise._squares.item() == pytest.approx(norm**2, rel=1e-9)


def test_deepspeed_takes_the_norm_in_float64():
    """So that stages 1 and 2 clip as our stage 0 does (DeepSpeed 0.19.8)."""
    from deepspeed.runtime.zero.stage_1_and_2 import get_norm_dtype

    assert get_norm_dtype() == torch.float64
