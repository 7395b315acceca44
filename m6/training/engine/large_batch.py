"""LAMB and LARS: optimizers for large batches. They scale the update of each tensor to the norm of its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from m6.training.engine.tensor_norms import TensorLayout


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
