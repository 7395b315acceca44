"""The optimizer's parameter groups."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: ``matrices`` with weight decay; ``vectors``, which are biases and norms, without."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Parameters of experts have one more dimension, the expert.
            stacked = hasattr(parameter, "num_global_experts")
            (plain if parameter.dim() - stacked < 2 else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "matrices"},
        {"params": plain, "weight_decay": 0.0, "name": "vectors"},
    ]
