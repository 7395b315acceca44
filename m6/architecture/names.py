"""Names and numbers that models, exports and data agree on.

The joint vocabulary has text pieces, then special tokens, then image codes. ``auto_map`` names the classes of an export
for transformers. Weights of low-rank adapters have names of their own.
"""

from __future__ import annotations

from typing import Any, Literal

SPECIAL_TOKENS: tuple[str, ...] = (
    "<pad>",
    "<bos>",  # begins the target of every sample
    "<eos>",
    "<mask>",
    "<image>",  # placeholder at each position of an image's patch
    "<boi>",  # begins a sequence of image codes
    "<eoi>",
    "<sep>",
    "<code_mask>",  # a hidden image code
    *(f"<reserved_{k}>" for k in range(9, 16)),
)
NUM_SPECIAL_TOKENS = 16

IGNORED_LABEL = -100
"""The label of a position without a target; PyTorch's losses ignore it by default."""

# Token types: image patch (and padding), source, target including its <bos>.
IMAGE, SOURCE, TARGET = 0, 1, 2


def without_auto_map(owner: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Removes ``auto_map`` from the arguments of an object, unless its class will save its code, too.

    transformers loads classes from an export with ``trust_remote_code``, and only these classes save their code. The
    same classes of this package save no code, so a saved ``auto_map`` would name missing files.

    Args:
        owner: the object, of a class with ``save_pretrained``.
        arguments: the content of its JSON file.
    """
    if owner._auto_class is not None:
        return arguments
    return {name: value for name, value in arguments.items() if name != "auto_map"}


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
