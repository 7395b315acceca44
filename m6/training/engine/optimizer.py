"""The optimizer of the JSON's section ``optimizer``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from m6.architecture.configuration import M6Config
from m6.config.deepspeed import DeepSpeedSettings
from m6.model.parameters import matrices_of_blocks, parameter_groups
from m6.training.engine import tensor_norms
from m6.training.engine.partitions import is_expert


def build_optimizer(model: nn.Module, settings: DeepSpeedSettings, fused: bool = True) -> torch.optim.Optimizer:
    """Builds AdamW, Adafactor, Muon, LAMB or LARS, with weight decay only on matrices.

    A group's ``lr_ratio`` multiplies the run's learning rate.

    Adafactor keeps one row and one column of second moments per matrix, and per expert of a stack
    (Shazeer and Stern 2018, arXiv 1804.04235).

    Args:
        fused: AdamW updates all parameters of a group in one kernel. On CPUs this kernel rounds the last elements of a
            partition differently. The bits then depend on the borders of ZeRO's partitions, and so on the number of
            ranks.
    """
    params = settings.optimizer_params
    groups = parameter_groups(model, params["weight_decay"])
    blocks = matrices_of_blocks(model, cast(M6Config, model.config)) if settings.optimizer_type == "Muon" else {}
    if settings.optimizer_type in ("Lamb", "Lars"):
        groups[0]["by_tensor"] = True
    if blocks:
        groups = [
            {**groups[0], "params": list(blocks), "name": "blocks", "muon": True},
            {**groups[0], "params": [parameter for parameter in groups[0]["params"] if parameter not in blocks]},
            *groups[1:],
        ]
        if params["adamw_lr"] is not None:
            for group in groups[1:]:
                group["lr_ratio"] = params["adamw_lr"] / params["lr"]
    if any(map(is_expert, model.parameters())):
        # ZeRO partitions experts over the ranks with the same experts, so they need separate groups.
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(groups)
    if settings.optimizer_type == "Adafactor":
        return Adafactor(groups, lr=params["lr"], beta2_decay=params["beta2_decay"], d=params["clipping_threshold"])
    adamw = {name: params[name] for name in ("lr", "betas", "eps") if name in params}
    if settings.optimizer_type in ("Lamb", "Lars"):
        from m6.training.engine.large_batch import Lamb, Lars

        layouts = tensor_norms.layouts_of([*model.parameters()])
        if settings.optimizer_type == "Lamb":
            return Lamb(groups, layouts, **adamw)
        return Lars(groups, layouts, **{name: params[name] for name in ("lr", "momentum", "trust_coefficient")})
    if settings.optimizer_type == "Muon":
        from m6.training.engine.matrices import MatrixLayout, Run
        from m6.training.engine.muon import Muon

        matrices = {
            parameter: MatrixLayout([Run.of(parameter, 0, stack)], parameter.device)
            for parameter, stack in blocks.items()
        }
        dtype = torch.float32 if settings.product_dtype == "fp32" else torch.bfloat16
        return Muon(groups, matrices, params["momentum"], dtype, fused=fused, **adamw)
    return torch.optim.AdamW(groups, fused=fused, **adamw)


def follow_partitions(optimizer: Any, zero: Any, model: nn.Module, settings: DeepSpeedSettings) -> None:
    """Tells an optimizer of whole matrices or tensors where they are in the flat partitions of ZeRO."""
    if settings.optimizer_type == "Muon":
        from m6.training.engine.matrices import layouts_in_zero

        optimizer.layouts = layouts_in_zero(zero, matrices_of_blocks(model, cast(M6Config, model.config)))
    elif settings.optimizer_type in ("Lamb", "Lars"):
        optimizer.layouts = tensor_norms.layouts_in_zero(zero)


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor with each expert of a stack as a separate parameter.

    Adafactor scales and clips an update by means over a whole parameter. For a whole stack these means would depend on
    the number of experts on a rank. An expert's bias is a matrix of one row, as in the store of offloaded experts.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Fills the lists of parameters, gradients, row, column and unfactored variances, and step counters."""
        for parameter in group["params"]:
            state = self.state[parameter]
            if hasattr(parameter, "num_global_experts") and parameter.dim() == 2 and not state:
                # PyTorch would treat a stack of biases as one matrix, with one column variance for all experts.
                state["step"] = torch.tensor(0.0)
                state["row_var"] = torch.zeros_like(parameter[:, :1])
                state["col_var"] = torch.zeros_like(parameter)
        has_complex = super()._init_group(group, *lists)
        rows = list(zip(*lists, strict=True))
        for values in lists:
            values.clear()
        for parameter, *tensors, step in rows:
            split = hasattr(parameter, "num_global_experts")
            for index in range(len(parameter) if split else 1):
                # A matrix; one row of a stack of biases stays a matrix.
                of_expert = slice(index, index + 1) if parameter.dim() == 2 else index
                parts = [part[of_expert] if split and part is not None else part for part in (parameter, *tensors)]
                # The stack has one step counter: only the first expert advances it, the others use copies.
                parts.append(step if index == 0 else step.clone())
                for values, part in zip(lists, parts, strict=True):
                    values.append(part)
        return has_complex
