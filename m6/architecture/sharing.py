"""Weight sharing between layers: the Pseudo model of Pseudo-to-Real (M6-10T, arXiv 2110.03888).

The Pseudo model has the same depth and computation as the Real model. Consecutive layers form a group, and all layers
of a group use the same module for each shared part. ``named_parameters`` lists a shared parameter once, under its name
in the first layer of the group. Checkpoints use the same name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from m6.architecture.settings import ModelSettings
from m6.errors import UserError

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
    """The groups of layers and their shared parts.

    Attributes:
        num_layers: number of layers of the model.
        num_groups: number of groups of consecutive layers; their sizes differ by at most 1. 1: all layers share.
        parts: the parts shared in each group; a part is ignored in layers without it.
    """

    num_layers: int
    num_groups: int
    parts: tuple[SharedPart, ...]

    def first_layer(self, layer: int) -> int:
        """The first layer of the group of ``layer``; shared parameters have the names of this layer."""
        return -(-self._group(layer) * self.num_layers // self.num_groups)  # the inverse of ``_group``, rounded up

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

    def check(self, config: ModelSettings) -> None:
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
