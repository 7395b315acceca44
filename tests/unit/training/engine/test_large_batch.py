"""LAMB and LARS: a step is the published formula, for each tensor and each expert, wherever partitions cut them."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from m6.training.engine import norms
from m6.training.engine.norms import layouts_of
from m6.training.engine.optimizer import Lamb, LargeBatchOptimizer, Lars

LAMB = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-6}
LARS = {"lr": 0.5, "momentum": 0.7, "trust_coefficient": 0.01}
DECAY = 0.1


def parameters_of() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"matrix": (5, 7), "experts": (3, 4, 5), "zeros": (4, 4), "bias": (6,)}
    found = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    found["zeros"].data.zero_()
    found["experts"].num_global_experts = 6  # type: ignore[attr-defined]
    return found


def gradients_of(parameters: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(each.shape, generator=generator, dtype=torch.float64) for name, each in parameters.items()
    }


def optimizer_of(name: str, parameters: list[nn.Parameter], plain: list[nn.Parameter]) -> LargeBatchOptimizer:
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": DECAY, "by_tensor": True},
        {"params": plain, "weight_decay": 0.0},
    ]
    layouts = layouts_of([*parameters, *plain])
    return Lamb(groups, layouts, **LAMB) if name == "Lamb" else Lars(groups, layouts, **LARS)


def reference(name: str, w: Tensor, gradients: list[Tensor], scaled: bool) -> Tensor:
    """Steps of one tensor by the formulas of the papers."""
    w, decay = w.clone(), DECAY if scaled else 0.0
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step, g in enumerate(gradients, start=1):
        if name == "Lamb":
            b1, b2 = LAMB["betas"]
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            r = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + LAMB["eps"]) + decay * w
            ratio = float(w.norm() / r.norm()) if scaled and w.any() else 1.0
            w = w - LAMB["lr"] * ratio * r
        else:
            weight, gradient = float(w.norm()), float(g.norm())
            ratio = LARS["trust_coefficient"] * weight / (gradient + decay * weight) if scaled and weight else 1.0
            m = LARS["momentum"] * m + LARS["lr"] * ratio * (g + decay * w)
            w = w - m
    return w


@pytest.mark.parametrize("name", ["Lamb", "Lars"])
def test_steps_are_the_formulas_in_float64(name: str):
    parameters = parameters_of()
    before = {key: each.detach().clone() for key, each in parameters.items()}
    plain = [parameters["bias"]]
    optimizer = optimizer_of(name, [each for key, each in parameters.items() if key != "bias"], plain)
    for step in range(3):
        for key, gradient in gradients_of(parameters, step).items():
            parameters[key].grad = gradient
        optimizer.step()
    for key, each in parameters.items():
        gradients = [gradients_of(parameters, step)[key] for step in range(3)]
        experts = range(len(each)) if key == "experts" else [slice(None)]
        for expert in experts:
            expected = reference(name, before[key][expert], [grad[expert] for grad in gradients], key != "bias")
            torch.testing.assert_close(each.detach()[expert], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["Lamb", "Lars"])
def test_partitions_have_the_norms_of_whole_tensors(monkeypatch: pytest.MonkeyPatch, name: str, ranks: int):
    """Ranks one after the other: the squares of all ranks are added up before any rank reads them."""
    parameters = [each for key, each in parameters_of().items() if key != "bias"]
    flat = torch.cat([each.detach().flatten() for each in parameters])
    size = math.ceil(len(flat) / ranks)
    offsets = [0, 35, 95]
    partitions = list(torch.nn.functional.pad(flat, (0, size * ranks - len(flat))).split(size))
    layouts = []
    for rank, part in enumerate(partitions):
        zero = SimpleNamespace(
            single_partition_of_fp32_groups=[part],
            round_robin_bit16_groups=[parameters],
            round_robin_bit16_offsets=[offsets],
            real_dp_process_group=[None],
        )
        monkeypatch.setattr(norms.dist, "get_rank", lambda group, rank=rank: rank)
        layouts.append(norms.layouts_in_zero(zero)[part])
    squares = torch.zeros(1, 5, dtype=torch.float64)
    monkeypatch.setattr(norms.dist, "all_reduce", lambda tensor, group: squares.add_(tensor))
    for layout, part in zip(layouts, partitions, strict=True):
        layout.norms(part)
    whole = [parameters[0], *parameters[1], parameters[2]]
    torch.testing.assert_close(squares[0].sqrt(), torch.stack([each.detach().norm() for each in whole]))
    factors = torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0], dtype=torch.float64)
    for layout, part in zip(layouts, partitions, strict=True):
        layout.scale(part, factors)
    scaled = torch.cat([(each.detach() * factor).flatten() for each, factor in zip(whole, factors, strict=True)])
    torch.testing.assert_close(torch.cat(partitions)[: len(flat)], scaled)
