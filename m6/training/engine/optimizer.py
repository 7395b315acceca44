"""The optimizer of the JSON's section ``optimizer``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from m6.config.deepspeed import DeepSpeedSettings
from m6.model.parameter_groups import parameter_groups


def build_optimizer(model: nn.Module, settings: DeepSpeedSettings, ep_size: int) -> torch.optim.Optimizer:
    """Builds AdamW or Adafactor, with weight decay only on matrices.

    Adafactor keeps one row and one column of second moments per matrix, and per expert of a stack
    (Shazeer and Stern 2018, arXiv 1804.04235).
    """
    params = settings.optimizer_params
    groups = parameter_groups(model, params["weight_decay"])
    if ep_size > 1:
        # ZeRO partitions experts over the ranks that hold the same ones, so they need groups of their own.
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    if settings.optimizer_type == "Adafactor":
        return Adafactor(groups, lr=params["lr"], beta2_decay=params["beta2_decay"], d=params["clipping_threshold"])
    # fused: one kernel for all parameters of a group instead of several for each.
    return torch.optim.AdamW(groups, lr=params["lr"], betas=params["betas"], eps=params["eps"], fused=True)


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor with each expert of a stack as a separate parameter.

    Adafactor scales and clips an update by means over a whole parameter. For a whole stack these would depend on the
    number of experts that a rank holds.
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
                # The stack has one step counter: only the first expert advances it, the others use copies.
                parts.append(step if index == 0 else step.clone())
                for values, part in zip(lists, parts, strict=True):
                    values.append(part)
        return has_complex
