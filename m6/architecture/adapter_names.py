"""The names of the weights of a model with low-rank adapters."""

from __future__ import annotations

from typing import Literal

AdapterTarget = Literal["attention", "dense", "experts"]
"""The kinds of matrices with adapters."""

# As peft 0.21 names them: MODULE becomes MODULE.base_layer, with MODULE.lora_A.default and MODULE.lora_B.default.
_BASE, _PEFT = ".base_layer.", (".lora_A.default.weight", ".lora_B.default.weight")
_STACKED = ("_lora_A", "_lora_B")
DOWN, UP = ((_PEFT[part], _STACKED[part]) for part in (0, 1))
"""The ends of the names of A and of B."""


def is_adapter(name: str) -> bool:
    """Whether this is the name of a weight of an adapter."""
    return name.endswith((*DOWN, *UP))


def plain_name(name: str) -> str:
    """Converts the name of a weight with adapters to its name in the model without adapters."""
    return name.replace(_BASE, ".")


def adapter_names(name: str) -> list[tuple[str, str]]:
    """The possible names of A and B for a weight; ``name`` is its name in the model without adapters."""
    module = name.removesuffix(".weight")
    return [(module + _PEFT[0], module + _PEFT[1]), (name + _STACKED[0], name + _STACKED[1])]
