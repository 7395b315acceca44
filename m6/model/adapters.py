"""Low-rank adapters of a model's matrices: LoRA (arXiv 2106.09685), by peft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

AdapterTarget = Literal["attention", "dense"]
_MODULES: dict[AdapterTarget, tuple[str, ...]] = {
    "attention": ("attention.qkv", "attention.output"),
    "dense": ("ffn.input", "ffn.output"),
}
# As peft 0.21 names them: MODULE becomes MODULE.base_layer, with MODULE.lora_A.default and MODULE.lora_B.default.
_BASE, DOWN, UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"


def add_adapters(model: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[AdapterTarget]) -> None:
    """Replaces matrices W of a model on the meta device by W + alpha / rank * B A, where only A and B are trained.

    Args:
        model: gets the adapters in place; all its other parameters are frozen.
        rank: rows of A and columns of B.
        alpha: scale of the adapters times ``rank``.
        dropout: rate at the input of A.
        targets: which matrices; the model has some of each.
    """
    from peft import LoraConfig, inject_adapter_in_model

    modules = [name for target in targets for name in _MODULES[target]]
    settings = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules)  # type: ignore[arg-type]
    with torch.device("meta"):
        inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)


def is_adapter(name: str) -> bool:
    """Whether this is the name of a weight of an adapter."""
    return name.endswith((DOWN, UP))


def plain_name(name: str) -> str:
    """The name that a weight of an adapted model has in the model without adapters."""
    return name.replace(_BASE, ".")
