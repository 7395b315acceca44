"""The global norm where DeepSpeed's own is not enough: at ZeRO stage 0, and with experts outside of its engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.training.engine.partitions import is_expert


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
            (experts if is_expert(parameter) else dense).append(parameter.grad)
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


def count_in_norm(zero: Any, squares: Callable[[], float]) -> None:
    """Makes DeepSpeed's optimizer (ZeRO stages 1 and 2, 0.19.8) count other gradients in its norm and its overflow.

    Args:
        zero: the optimizer of the DeepSpeed engine.
        squares: returns the sum of squares of the other gradients of the step, loss scale included; equal on all
            ranks.
    """
    own_norm, own_check = zero.scaled_global_norm, zero.check_overflow

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        norm = own_norm(norm_type)
        return torch.where(norm < 0, norm, (norm.square() + squares()).sqrt())  # below 0: not finite

    def check_overflow(partition_gradients: bool = True) -> None:
        own_check(partition_gradients=partition_gradients)
        zero.overflow = zero.overflow or not math.isfinite(squares())

    zero.scaled_global_norm, zero.check_overflow = scaled_global_norm, check_overflow
