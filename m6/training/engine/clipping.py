"""Clipping by the global norm at ZeRO stage 0, where DeepSpeed reports no norm and counts local experts only."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def clip_gradients(
    model: nn.Module, max_norm: float, ep_group: dist.ProcessGroup | None, other_squares: float = 0.0
) -> float:
    """Clips in place by the global norm, and returns that norm (stage 0, where DeepSpeed reports none).

    A non-finite norm leaves the gradients as they are: the caller skips the step.

    Args:
        max_norm: 0 for no clipping.
        ep_group: the expert-parallel group, over which the squares of the local experts are added.
        other_squares: the sum of squares of gradients that are not the model's, equal on all ranks.
    """
    dense: list[torch.Tensor] = []
    experts: list[torch.Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            (dense if getattr(parameter, "allreduce", True) else experts).append(parameter.grad)
    total = _sum_of_squares(dense, next(model.parameters()).device)
    expert_total = _sum_of_squares(experts, total.device)
    if ep_group is not None:
        dist.all_reduce(expert_total, group=ep_group)
    norm = float((total + expert_total + other_squares).sqrt())
    if max_norm > 0 and norm > max_norm and norm != float("inf"):
        torch._foreach_mul_([*dense, *experts], max_norm / (norm + 1e-6))
    return norm


def _sum_of_squares(gradients: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(gradients)).float().square().sum()
