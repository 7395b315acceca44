"""Layers that share weights: the Pseudo model of Pseudo-to-Real (M6-10T, arXiv 2110.03888).

The Pseudo model has the depth and the computation of the Real one. Consecutive layers form a group, and the parts
that are shared are one module in all layers of the group. ``named_parameters`` names a shared parameter after the
group's first layer, and by that name checkpoints hold it: once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from m6.errors import UserError
from m6.model.configuration import M6Config

SharedPart = Literal["attention", "norms", "ffn", "router", "experts"]
PARTS: tuple[SharedPart, ...] = get_args(SharedPart)

_MODULES: dict[SharedPart, tuple[str, ...]] = {
    "attention": ("attention",),
    "norms": ("attention_norm", "ffn_norm"),
    "ffn": ("ffn.input", "ffn.output"),
    "router": ("ffn.router",),
    "experts": ("ffn.experts", "ffn.shared"),
}
_FEED_FORWARD: set[SharedPart] = {"ffn", "router", "experts"}
_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.(.+)")


@dataclass(frozen=True)
class Sharing:
    """Which layers share what.

    Attributes:
        num_layers: of the model.
        num_groups: of consecutive layers, as equal in size as the numbers allow; 1: all layers share.
        parts: what the layers of a group share; a part that a layer does not have counts for nothing.
    """

    num_layers: int
    num_groups: int
    parts: tuple[SharedPart, ...]

    def first_layer(self, layer: int) -> int:
        """The first layer of the group of ``layer``, which gives the shared parameters their names."""
        return -(-self._group(layer) * self.num_layers // self.num_groups)

    def group(self, layer: int) -> list[int]:
        """All layers of the group of ``layer``."""
        return [other for other in range(self.num_layers) if self._group(other) == self._group(layer)]

    def real_names(self, name: str) -> list[str]:
        """The names in the Real model of the parameter ``name`` of the Pseudo model; several if it is shared."""
        found = _LAYER.fullmatch(name)
        if found is None or not self.shares(found[3]):
            return [name]
        return [f"{found[1]}{layer}.{found[3]}" for layer in self.group(int(found[2]))]

    def modules(self) -> Iterator[tuple[int, int, str]]:
        """Each shared module of each layer: the layer, the first one of its group, the module's name in both."""
        for layer in range(self.num_layers):
            for part in self.parts:
                for name in _MODULES[part]:
                    yield layer, self.first_layer(layer), name

    def check(self, config: M6Config) -> None:
        """Raises UserError if the layers of a group of this model cannot share, or there is nothing that they do."""
        if self.num_groups >= self.num_layers:
            raise UserError(
                f"num_groups {self.num_groups} is not below the {self.num_layers} layers of the model: "
                "nothing would be shared"
            )
        sparse = [config.is_moe_layer(layer) for layer in range(self.num_layers)]
        present = {"attention", "norms"} | {part for part in PARTS if any(s == (part != "ffn") for s in sparse)}
        if not present & set(self.parts):
            raise UserError(f"shared {list(self.parts)} names nothing that a layer of this model has")
        if not _FEED_FORWARD & set(self.parts):
            return
        for layer in range(self.num_layers):
            first = self.first_layer(layer)
            if sparse[layer] != sparse[first]:
                kinds = {True: "a mixture of experts", False: "dense"}
                raise UserError(
                    f"layers {first} and {layer} are in one group but differ in shape: the feed-forward of the first "
                    f"is {kinds[sparse[first]]}, that of the second {kinds[sparse[layer]]} (moe_layer_frequency "
                    f'{config.moe_layer_frequency}); share ["attention", "norms"] only, or use other groups'
                )

    def shares(self, name: str) -> bool:
        """Whether the layers of a group share the parameter that is called ``name`` within a layer."""
        return any(name.startswith(f"{module}.") for part in self.parts for module in _MODULES[part])

    def _group(self, layer: int) -> int:
        return layer * self.num_groups // self.num_layers


def share_layers(model: nn.Module, sharing: Sharing) -> None:
    """Makes the layers below ``model`` share; what they had of their own is dropped.

    To be called on the meta device, before anything is allocated, and after expert parallelism, which cuts each
    layer's experts.
    """
    layers: Any = next(m.layers for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))
    for layer, first, name in sharing.modules():
        if layer != first and _has(layers[layer], name):
            layers[layer].set_submodule(name, layers[first].get_submodule(name))


def count_uses(model: nn.Module) -> dict[nn.Parameter, int]:
    """How many modules' names lead to each parameter: the number of layers that use a shared one, else 1."""
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))


def divide_gradients(model: nn.Module) -> None:
    """Makes the gradient of every shared parameter the mean over its uses (arXiv 2110.03848, algorithm 1, line 5)
    in place of autograd's sum.

    A hook divides it before it is accumulated, hence before any reduction, clipping or partitioning sees it.
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
