"""Low-rank adapters of a model's matrices: LoRA (arXiv 2106.09685).

Linear layers have peft's adapters. peft 0.21 also adapts stacked weights, but with all experts in one matrix. Expert
parallelism cannot shard such a matrix over ranks, so experts have adapters of their own (``moe.experts``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from m6.architecture.adapter_names import AdapterTarget
from moe import MoELayer

_MODULES: dict[str, tuple[str, ...]] = {
    "attention": ("attention.qkv", "attention.output"),
    "dense": ("ffn.input", "ffn.output"),
}


def add_adapters(model: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[AdapterTarget]) -> None:
    """Replaces matrices W of a model on the meta device by W + alpha / rank * B A; only A and B are trained.

    Args:
        model: gets the adapters in place; all its other parameters are frozen.
        rank: rows of A and columns of B.
        alpha: scale of the adapters times ``rank``.
        dropout: rate at the input of A; experts have none.
        targets: kinds of matrices; the model must have matrices of each kind.
    """
    model.requires_grad_(False)
    modules = [name for target in targets for name in _MODULES.get(target, ())]
    if modules:
        from peft import LoraConfig, inject_adapter_in_model

        settings = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=modules)  # type: ignore[arg-type]
        with torch.device("meta"):
            inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)
    if "experts" in targets:
        for module in model.modules():
            if isinstance(module, MoELayer):
                module.experts.add_adapters(rank, alpha / rank)
