"""Makes the layers of a model share modules, see ``m6.architecture.sharing``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from m6.architecture.sharing import Sharing


def share_layers(model: nn.Module, sharing: Sharing) -> None:
    """Replaces the shared modules of each layer by those of the first layer of its group.

    Call it on the meta device, before parameters are allocated, and after expert parallelism has split the experts of
    each layer.
    """
    # The blocks may be in the model itself or in a submodule.
    layers: Any = next(m.layers for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))
    for layer, first, name in sharing.modules():
        if layer != first and _has(layers[layer], name):
            layers[layer].set_submodule(name, layers[first].get_submodule(name))


def count_uses(model: nn.Module) -> dict[nn.Parameter, int]:
    """Counts the uses of each parameter: the number of its layers, or 1 outside of layers."""
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))


def divide_gradients(model: nn.Module) -> None:
    """Makes the gradient of every shared parameter the mean over its uses (arXiv 2110.03848, algorithm 1, line 5).

    Autograd gives the sum. A hook divides the gradient before it is accumulated, so reduction, clipping and
    partitioning see the mean.
    """
    for parameter, uses in count_uses(model).items():
        if uses > 1 and parameter.requires_grad:
            parameter.register_hook(_Divide(uses))


class _Divide:
    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self.divisor


def _has(layer: nn.Module, name: str) -> bool:
    try:
        layer.get_submodule(name)
    except AttributeError:
        return False
    return True
