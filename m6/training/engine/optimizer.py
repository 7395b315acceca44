"""The optimizer of the JSON's section ``optimizer``; Muon is in ``muon.py``. LAMB and LARS are for large batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from m6.architecture.configuration import M6Config
from m6.config.deepspeed import DeepSpeedSettings
from m6.model.parameters import matrices_of_blocks, parameter_groups
from m6.training.deepspeed_private import is_expert
from m6.training.engine import norms
from m6.training.engine.norms import TensorLayout


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
        layouts = norms.layouts_of([*model.parameters()])
        if settings.optimizer_type == "Lamb":
            return Lamb(groups, layouts, **adamw)
        return Lars(groups, layouts, **{name: params[name] for name in ("lr", "momentum", "trust_coefficient")})
    if settings.optimizer_type == "Muon":
        from m6.training.engine.muon import MatrixLayout, Muon, MuonShard

        matrices = {
            parameter: MatrixLayout([MuonShard.of(parameter, 0, stack)], parameter.device)
            for parameter, stack in blocks.items()
        }
        dtype = torch.float32 if settings.product_dtype == "fp32" else torch.bfloat16
        return Muon(groups, matrices, params["momentum"], dtype, fused=fused, **adamw)
    return torch.optim.AdamW(groups, fused=fused, **adamw)


def follow_partitions(optimizer: Any, zero: Any, model: nn.Module, settings: DeepSpeedSettings) -> None:
    """Tells an optimizer of whole matrices or tensors where they are in the flat partitions of ZeRO."""
    if settings.optimizer_type == "Muon":
        from m6.training.engine.muon import layouts_in_zero

        optimizer.layouts = layouts_in_zero(zero, matrices_of_blocks(model, cast(M6Config, model.config)))
    elif settings.optimizer_type in ("Lamb", "Lars"):
        optimizer.layouts = norms.layouts_in_zero(zero)


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


class LargeBatchOptimizer(torch.optim.Optimizer, ABC):
    """Scales the norm of an update to the norm of the weights, separately for each tensor and each expert.

    Only groups with a true value ``by_tensor`` are scaled. Biases and norms are not, as in the authors' code.

    Attributes:
        layouts: the model's tensors in each tensor of the parameter groups. ZeRO replaces the parameters of a group by
            one flat partition; the layouts are then replaced, too.
    """

    def __init__(self, groups: list[dict[str, Any]], layouts: Mapping[Tensor, TensorLayout], **options: Any) -> None:
        super().__init__(groups, options)
        self.layouts = layouts

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters and overwrites their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)

    @abstractmethod
    def _update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None: ...


class Lamb(LargeBatchOptimizer):
    """LAMB (You et al. 2019, arXiv 1904.00962, algorithm 2), with phi(z) = z.

    With AdamW's moments m and v, corrected for their bias, and d = m / (sqrt(v) + eps) + weight_decay w, the weights w
    change by -lr d |w| / |d|.
    """

    def _update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), device=weights.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weights), torch.zeros_like(weights)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        torch.sqrt(second, out=gradient)
        gradient.div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        direction = torch.div(first, gradient, out=gradient).div_(1 - beta1**step)
        direction.add_(weights, alpha=group["weight_decay"])
        if group.get("by_tensor"):
            layout = self.layouts[weights]
            weight_norm, norm = layout.norms(weights.view(-1), direction.view(-1))
            layout.scale(direction.view(-1), _ratio(weight_norm, norm))
        weights.sub_(direction, alpha=group["lr"])


class Lars(LargeBatchOptimizer):
    """LARS (You et al. 2017, arXiv 1708.03888, algorithm 1).

    The momentum b moves to momentum b + lr r (g + weight_decay w), with the gradient g and r = trust_coefficient |w| /
    (|g| + weight_decay |w|), and the weights w change by -b. Unscaled tensors have r = 1.
    """

    def _update(self, weights: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = torch.zeros((), device=weights.device)
            state["momentum_buffer"] = torch.zeros_like(weights)
        state["step"] += 1
        decay = group["weight_decay"]
        if group.get("by_tensor"):
            layout = self.layouts[weights]
            weight_norm, norm = layout.norms(weights.view(-1), gradient.view(-1))
            gradient.add_(weights, alpha=decay)
            ratio = _ratio(group["trust_coefficient"] * weight_norm, norm + decay * weight_norm)
            layout.scale(gradient.view(-1), ratio)
        else:
            gradient.add_(weights, alpha=decay)
        weights.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(gradient, alpha=group["lr"]))


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Returns the quotients; 1 if a number is 0, so that weights of 0 can change."""
    defined = (numerator > 0) & (denominator > 0)
    return torch.where(defined, numerator / torch.where(defined, denominator, 1.0), 1.0)
