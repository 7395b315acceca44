"""The optimizer that the JSON's ``optimizer`` section describes, over the right parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from m6.config.deepspeed import DeepSpeedSettings
from m6.model.parameter_groups import parameter_groups


def build_optimizer(model: nn.Module, settings: DeepSpeedSettings, ep_size: int) -> torch.optim.Optimizer:
    """AdamW or Adafactor with weight decay on matrices only.

    Adafactor keeps one row and one column of second moments per matrix, and per expert of a stack
    (Shazeer and Stern 2018, arXiv 1804.04235).
    """
    params = settings.optimizer_params
    groups = parameter_groups(model, params["weight_decay"])
    if ep_size > 1:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    if settings.optimizer_type == "Adafactor":
        return Adafactor(groups, lr=params["lr"], beta2_decay=params["beta2_decay"], d=params["clipping_threshold"])
    return torch.optim.AdamW(groups, lr=params["lr"], betas=params["betas"], eps=params["eps"], fused=True)


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor, for which each expert of a stack is a parameter of its own.

    The scale of an update and its clipping are means over a whole parameter: over a stack they would depend on
    how many experts a rank holds.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Fills the lists of parameters, gradients, row, column and unfactored variances, and step counters."""
        has_complex = super()._init_group(group, *lists)
        rows = list(zip(*lists, strict=True))
        for values in lists:
            values.clear()
        for parameter, *tensors, step in rows:
            split = hasattr(parameter, "num_global_experts")
            for index in range(len(parameter) if split else 1):
                parts = [part if part is None or not split else part[index] for part in (parameter, *tensors)]
                # One counter is stored for the stack, and only its own update may advance it.
                parts.append(step if index == 0 else step.clone())
                for values, part in zip(lists, parts, strict=True):
                    values.append(part)
        return has_complex
