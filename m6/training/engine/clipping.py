"""The global gradient norm in three cases not covered by DeepSpeed: ZeRO stage 0, partitions of pipelines, and
offloaded experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.training.deepspeed_private import is_divided, is_expert
from m6.training.engine.tensor_norms import norms_of


class PartGroups(NamedTuple):
    """The groups of ranks with other parts of the same tensors; None: this rank has all parts.

    Attributes:
        tensor: ranks with other parts of sharded matrices.
        experts: ranks with other experts.
    """

    tensor: dist.ProcessGroup | None
    experts: dist.ProcessGroup | None


def clip_gradients(model: nn.Module, max_norm: float, groups: PartGroups, other_squares: float = 0.0) -> float:
    """Clips the gradients in place by their global norm, at ZeRO stage 0: DeepSpeed does not report the norm there.

    If the norm is not finite, the gradients are not changed, and the caller skips the step.

    Args:
        max_norm: largest norm; 0: no clipping.
        groups: the ranks to sum the squares of parts over.
        other_squares: the sum of squares of gradients outside of the model, equal on all ranks.

    Returns:
        the norm before clipping.
    """
    gradients = {each: each.grad for each in model.parameters() if each.grad is not None}
    norm = float(gradient_norm(gradients, groups, next(model.parameters()).device, other_squares))
    shrink(list(gradients.values()), norm, max_norm)
    return norm


def shrink(gradients: list[Tensor], norm: float, max_norm: float) -> None:
    """Shrinks gradients in place from ``norm`` to ``max_norm``, unless ``norm`` is smaller or not finite."""
    # A NaN is not larger than max_norm, so it needs no extra condition.
    if max_norm > 0 and norm > max_norm and norm != float("inf"):
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def gradient_norm(
    gradients: Mapping[nn.Parameter, Tensor], groups: PartGroups, device: torch.device, other_squares: float = 0.0
) -> Tensor:
    """Returns the norm of the gradients of the whole model, or of the layers of a stage, in fp64.

    Args:
        gradients: of this rank's parameters.
        groups: the ranks to sum the squares of parts over.
        other_squares: the sum of squares of gradients outside of the model, equal on all ranks.
    """
    total = _sum_of_squares([each for parameter, each in gradients.items() if not is_divided(parameter)], device)
    parts = [(parameter, each) for parameter, each in gradients.items() if is_divided(parameter)]
    for of_experts, group in ((True, groups.experts), (False, groups.tensor)):
        squares = _sum_of_squares([each for parameter, each in parts if is_expert(parameter) == of_experts], device)
        if group is not None:
            dist.all_reduce(squares, group=group)
        total = total + squares
    return (total + other_squares).sqrt()


def partition_norm(
    pieces: Iterable[tuple[nn.Parameter, Tensor]],
    copies: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
    groups: PartGroups,
    device: torch.device,
    other_squares: float = 0.0,
) -> Tensor:
    """Returns ``gradient_norm`` of gradients that are partitioned over ranks.

    Args:
        pieces: parameters, and their gradients' elements on this rank.
        copies: the ranks with the other elements of the same parameters, and of the same experts; None: all.
        groups, other_squares: see ``gradient_norm``.
    """
    kinds: dict[tuple[bool, bool], list[Tensor]] = {(False, False): [], (True, False): [], (True, True): []}
    for parameter, gradient in pieces:
        kinds[is_divided(parameter), is_expert(parameter)].append(gradient)
    whole, sharded, experts = (_sum_of_squares(gradients, device) for gradients in kinds.values())
    dense = torch.stack([whole, sharded])
    dist.all_reduce(dense, group=copies[0])
    dist.all_reduce(experts, group=copies[1])
    for squares, group in ((dense[1], groups.tensor), (experts, groups.experts)):
        if group is not None:
            dist.all_reduce(squares, group=group)
    return (dense.sum() + experts + other_squares).sqrt()


def _sum_of_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:  # a dense model has no experts
        return torch.zeros((), dtype=torch.float64, device=device)
    return norms_of(gradients).square().sum()
