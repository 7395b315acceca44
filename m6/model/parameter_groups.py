"""Groups of parameters that the optimizer treats alike."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; biases and norms without."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            stacked = hasattr(parameter, "num_global_experts")  # a vector or a matrix for each expert
            (plain if parameter.dim() - stacked < 2 else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "matrices"},
        {"params": plain, "weight_decay": 0.0, "name": "vectors"},
    ]
