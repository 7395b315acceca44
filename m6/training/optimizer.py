"""The optimizer that the JSON's ``optimizer`` section describes, over the right parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from m6.deepspeed_keys import DeepSpeedSettings


def build_optimizer(model: nn.Module, settings: DeepSpeedSettings, ep_size: int) -> torch.optim.Optimizer:
    """AdamW or Adafactor with weight decay on matrices only.

    Adafactor keeps one row and one column of second moments per matrix (Shazeer and Stern 2018, arXiv
    1804.04235); stacked experts are factored one by one since only the last two dimensions are.
    """
    groups = parameter_groups(model, settings.optimizer_params.get("weight_decay", 0.0))
    if ep_size > 1:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    params = {key: value for key, value in settings.optimizer_params.items() if key != "weight_decay"}
    if settings.optimizer_type == "Adafactor":
        factored = {"beta2_decay": params.get("beta2_decay", -0.8), "d": params.get("clipping_threshold", 1.0)}
        return torch.optim.Adafactor(groups, lr=params["lr"], **factored)
    betas = tuple(params.get("betas", (0.9, 0.999)))
    return torch.optim.AdamW(groups, lr=params["lr"], betas=betas, eps=params.get("eps", 1e-8), fused=True)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; biases and norms without."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (plain if parameter.dim() < 2 else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay, "name": "matrices"},
        {"params": plain, "weight_decay": 0.0, "name": "vectors"},
    ]


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
