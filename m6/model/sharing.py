"""Layers that share weights: the Pseudo model of Pseudo-to-Real (M6-10T, arXiv 2110.03888).

The Pseudo model has the same depth and computation as the Real model. Consecutive layers form a group, and all layers
of a group use the same module for each shared part. ``named_parameters`` lists a shared parameter once, under the name
that it has in the first layer of the group. Checkpoints use that name.
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
    """Which layers share which parts.

    Attributes:
        num_layers: number of layers of the model.
        num_groups: number of groups of consecutive layers; their sizes differ by at most 1. 1: all layers share.
        parts: the parts that the layers of a group share; parts that a layer does not have are ignored.
    """

    num_layers: int
    num_groups: int
    parts: tuple[SharedPart, ...]

    def first_layer(self, layer: int) -> int:
        """The first layer of the group of ``layer``; shared parameters have the names of this layer."""
        return -(-self._group(layer) * self.num_layers // self.num_groups)

    def group(self, layer: int) -> list[int]:
        """All layers of the group of ``layer``."""
        return [member for member in range(self.num_layers) if self._group(member) == self._group(layer)]

    @property
    def group_sizes(self) -> list[int]:
        """The number of layers of each group, in the order of the model."""
        return list(Counter(map(self._group, range(self.num_layers))).values())

    def real_names(self, name: str) -> list[str]:
        """The names in the Real model of a parameter of the Pseudo model; several if it is shared."""
        match = _LAYER.fullmatch(name)
        if match is None or not self.shares(match[3]):
            return [name]
        return [f"{match[1]}{layer}.{match[3]}" for layer in self.group(int(match[2]))]

    def modules(self) -> Iterator[tuple[int, int, str]]:
        """Yields each shared module as (layer, first layer of its group, name of the module in a layer)."""
        for layer in range(self.num_layers):
            for part in self.parts:
                for name in _MODULES[part]:
                    yield layer, self.first_layer(layer), name

    def check(self, config: M6Config) -> None:
        """Raises UserError if layers of a group differ in shape, or if nothing would be shared."""
        if self.num_groups >= self.num_layers:
            raise UserError(
                f"num_groups {self.num_groups} is not below the {self.num_layers} layers of the model: "
                "nothing would be shared"
            )
        sparse = [config.is_moe_layer(layer) for layer in range(self.num_layers)]
        # "ffn" is a part of dense layers, "router" and "experts" are parts of sparse ones.
        present = {"attention", "norms"} | {part for part in PARTS if any(s == (part != "ffn") for s in sparse)}
        if not present & set(self.parts):
            raise UserError(f"shared {list(self.parts)} names no part that a layer of this model has")
        if not _FEED_FORWARD & set(self.parts):
            return
        for layer in range(self.num_layers):
            first = self.first_layer(layer)
            if sparse[layer] != sparse[first]:
                shapes = {True: "a mixture of experts", False: "dense"}
                raise UserError(
                    f"layers {first} and {layer} are in one group but differ in shape: the feed-forward of the first "
                    f"is {shapes[sparse[first]]}, that of the second {shapes[sparse[layer]]} (moe_layer_frequency "
                    f'{config.moe_layer_frequency}); share ["attention", "norms"] only, or use other groups'
                )

    def shares(self, name: str) -> bool:
        """Whether the layers of a group share a parameter; ``name`` is its name within a layer."""
        return any(name.startswith(f"{module}.") for part in self.parts for module in _MODULES[part])

    def _group(self, layer: int) -> int:
        return layer * self.num_groups // self.num_layers


def share_layers(model: nn.Module, sharing: Sharing) -> None:
    """Replaces the shared modules of each layer by those of the first layer of its group.

    Call it on the meta device, before parameters are allocated, and after expert parallelism, which splits the
    experts of each layer.
    """
    # The blocks may be in the model itself or in a submodule.
    layers: Any = next(m.layers for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))
    for layer, first, name in sharing.modules():
        if layer != first and _has(layers[layer], name):
            layers[layer].set_submodule(name, layers[first].get_submodule(name))


def count_uses(model: nn.Module) -> dict[nn.Parameter, int]:
    """Counts the uses of each parameter: the number of layers that share it, or 1."""
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
