"""The optimizers' arithmetic: against PyTorch's optimizers, and the compiled kernel against the PyTorch code."""

from dataclasses import replace

import pytest
import torch

import offload.optimizer.update
from offload.optimizer.master_weights import load_kernel, read_master, remainder_dtype, write_master
from offload.optimizer.settings import OptimizerSettings
from offload.optimizer.update import sum_of_squares, update

SHAPE = (3, 7, 19)
SETTINGS = [
    OptimizerSettings("adamw", weight_decay=0.1),
    OptimizerSettings("adafactor", weight_decay=0.1),
    OptimizerSettings("sgd", momentum=0.9),
    OptimizerSettings("sgd"),
    OptimizerSettings("muon", momentum=0.9, weight_decay=0.1, vector_rate=1.0),
]
# Rounding in the products of Muon is enlarged at small singular values.
TOLERANCES = {"muon": 2e-5}


class ReferenceMuon:
    """Muon by singular values, in double."""

    def __init__(self, parameters: list[torch.nn.Parameter], settings: OptimizerSettings) -> None:
        self._parameters, self._settings = parameters, settings
        self._momenta = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self) -> None:
        mu, rate = self._settings.momentum, 0.01
        for parameter, momentum in zip(self._parameters, self._momenta, strict=True):
            momentum.mul_(mu).add_((1 - mu) * parameter.grad)
            left, values, right = torch.linalg.svd(mu * momentum + (1 - mu) * parameter.grad, full_matrices=False)
            values /= values.square().sum().sqrt()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            change = left @ torch.diag(values) @ right * 0.2 * max(parameter.shape) ** 0.5
            parameter.mul_(1 - rate * self._settings.weight_decay).sub_(rate * change)


def run(settings, dtype, gradient_dtype=torch.float32, num_steps=20, coefficient=0.5):
    """A few steps from random weights on random gradients; returns weight, remainder, states and fp32 masters."""
    generator = torch.Generator().manual_seed(3)
    weight, remainder = torch.empty(SHAPE, dtype=dtype), None
    stored = remainder_dtype(dtype, settings.masters)
    if stored is not None:
        remainder = torch.empty(SHAPE, dtype=stored)
    write_master(torch.randn(SHAPE, generator=generator), weight, remainder)
    states = {name: torch.zeros(shape) for name, shape in settings.states(SHAPE).items()}
    for step in range(1, num_steps + 1):
        gradient = torch.randn(SHAPE, generator=generator).to(gradient_dtype)
        update(settings, step, 0.01, coefficient, weight, remainder, gradient, states)
    return [weight, *([] if remainder is None else [remainder]), *states.values()], read_master(weight, remainder)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_fp32_agrees_with_pytorch(settings):
    """To a few roundings of fp32 in each of 20 steps on values of size 1: PyTorch orders the operations differently.

    Its optimizers run in double, as the more precise reference.
    """
    _, got = run(settings, torch.float32)
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.nn.Parameter(part.double()) for part in torch.randn(SHAPE, generator=generator)]
    make = {
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01, weight_decay=settings.weight_decay),
        "adafactor": lambda: torch.optim.Adafactor(
            parameters, lr=0.01, weight_decay=settings.weight_decay, eps=(torch.finfo(torch.float32).eps, 1e-3)
        ),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=settings.momentum),
        "muon": lambda: ReferenceMuon(parameters, settings),
    }
    optimizer = make[settings.kind]()
    for _ in range(20):
        for parameter, gradient in zip(parameters, torch.randn(SHAPE, generator=generator), strict=True):
            parameter.grad = 0.5 * gradient.double()
        optimizer.step()
    expected = torch.stack([*parameters]).detach().float()
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCES.get(settings.kind, 2e-6))


@pytest.mark.parametrize("masters", [True, False], ids=["masters", "no masters"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernel_and_pytorch_agree_to_the_bit(settings, masters, dtype, gradient_dtype, monkeypatch):
    assert load_kernel() is not None, "this machine has a compiler"
    settings = replace(settings, masters=masters)
    compiled, _ = run(settings, dtype, gradient_dtype)
    monkeypatch.setattr(offload.optimizer.update, "load_kernel", lambda: None)
    fallback, _ = run(settings, dtype, gradient_dtype)
    for left, right in zip(compiled, fallback, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_split_master_is_fp32(settings):
    """bfloat16 with remainders trains to the same fp32 bits as fp32 itself."""
    _, split = run(settings, torch.bfloat16)
    _, whole = run(settings, torch.float32)
    assert torch.equal(split, whole)


@pytest.mark.parametrize("with_kernel", [True, False])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_new_weights_may_take_the_place_of_the_gradient(settings, dtype, masters, with_kernel, monkeypatch):
    """To the bit the same as in the place of the old weights, which are left as they were."""
    if not with_kernel:
        monkeypatch.setattr(offload.optimizer.update, "load_kernel", lambda: None)
    settings = replace(settings, masters=masters)
    generator = torch.Generator().manual_seed(4)
    values, gradient = (torch.randn(5, 31, 43, generator=generator) for _ in range(2))
    found = []
    for in_gradient in (False, True):
        weight, remainder = torch.empty(values.shape, dtype=dtype), None
        if (stored := remainder_dtype(dtype, masters)) is not None:
            remainder = torch.empty(values.shape, dtype=stored)
        write_master(values, weight, remainder)
        old, place = weight.clone(), gradient.to(dtype)
        states = {name: torch.zeros(shape) for name, shape in settings.states(values.shape).items()}
        target = place if in_gradient else None
        update(settings, 3, 0.01, 0.5, weight, remainder, place, states, target)
        assert torch.equal(weight, old) == in_gradient
        found.append([place if in_gradient else weight, *([] if remainder is None else [remainder]), *states.values()])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_vectors_are_not_decayed_and_not_factored(settings):
    """A stack of vectors is updated as vectors of their own without weight decay; tolerance as for matrices."""
    generator = torch.Generator().manual_seed(3)
    start, gradients = torch.randn(3, 19, generator=generator), torch.randn(20, 3, 19, generator=generator)
    weight = start.clone()
    states = {name: torch.zeros(shape) for name, shape in settings.states(weight.shape).items()}
    for step, gradient in enumerate(gradients, start=1):
        update(settings, step, 0.01, 1.0, weight, None, gradient, states)
    vectors = [torch.nn.Parameter(vector.double()) for vector in start]
    make = {
        "adamw": lambda: torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0),
        "adafactor": lambda: torch.optim.Adafactor(
            vectors, lr=0.01, weight_decay=0.0, eps=(torch.finfo(torch.float32).eps, 1e-3)
        ),
        "sgd": lambda: torch.optim.SGD(vectors, lr=0.01, momentum=settings.momentum),
        "muon": lambda: torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0),
    }
    optimizer = make[settings.kind]()
    for gradient in gradients:
        for vector, own in zip(vectors, gradient, strict=True):
            vector.grad = own.double()
        optimizer.step()
    torch.testing.assert_close(weight, torch.stack(vectors).detach().float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 1000, 4099])
def test_sum_of_squares(dtype, count):
    values = torch.randn(count).to(dtype)
    assert sum_of_squares(values) == pytest.approx(float(values.double().square().sum()), rel=1e-13)


def test_a_gradient_that_is_not_finite_makes_the_sum_not_finite():
    assert sum_of_squares(torch.tensor([1.0, float("inf")])) == float("inf")
    assert not sum_of_squares(torch.tensor([1.0, float("nan")])) >= 0
