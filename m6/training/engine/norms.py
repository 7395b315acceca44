"""Norms of tensors, also of tensors split by ZeRO's flat partitions, or sharded over the ranks of a tensor group.

Ranks exchange one number for each tensor.

It also computes the global gradient norm where DeepSpeed does not: at ZeRO stage 0, of partitions in pipelines, and
with offloaded experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.model.placements import Grid, Shard
from m6.training.deepspeed_private import is_divided, is_expert, partitions

_CHUNK = 2**18  # elements; their copies in fp64 stay in a processor's cache


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each tensor, [N] in fp64.

    On CPUs PyTorch 2.13 adds the squares of fp32 numbers in fp32, one after the other. With 10^8 equal numbers the norm
    is 1 % too small, and the error depends on where a tensor is split. On CPUs the squares are therefore added in fp64,
    as in DeepSpeed. On other devices the sums are trees in fp32, also for fp16: squares of fp16 numbers may overflow.

    Args:
        tensors: at least one, all on one device.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(list(tensors), dtype=torch.float32)).double()
    return torch.stack([_norm_in_fp64(tensor.detach()) for tensor in tensors])


def _norm_in_fp64(tensor: Tensor) -> Tensor:
    chunks = tensor.reshape(-1).split(_CHUNK)
    norms = [torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


@dataclass(frozen=True)
class Piece:
    """The range of a tensor of the model, or of one expert of a stack, in a flat tensor.

    Attributes:
        start, end: in the flat tensor.
        number: of the model's tensor or expert.
    """

    start: int
    end: int
    number: int


@dataclass(frozen=True)
class TensorLayout:
    """The positions of the model's tensors in a flat tensor.

    Attributes:
        pieces: ranges of the flat tensor.
        count: number of tensors, over all ranks of the group.
        device: for the exchange of norms.
        group: the ranks with the other pieces.
        is_partition: whether other ranks have other pieces.
        sharded: numbers of the tensors with other parts on the ranks of ``grid``.
        grid: the tensor group; None: no tensor is sharded.
    """

    pieces: Sequence[Piece]
    count: int
    device: torch.device
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    is_partition: bool = False
    sharded: Sequence[int] = ()
    grid: Grid | None = field(default=None, repr=False)

    def norms(self, *tensors: Tensor) -> Tensor:
        """Returns the norms of all tensors in N flat tensors, [N, count] in fp64. All ranks of the group call it."""
        squares = tensors[0].new_zeros(len(tensors), self.count, dtype=torch.float64)
        if self.pieces:
            numbers = torch.tensor([piece.number for piece in self.pieces], device=squares.device)
            for row, tensor in zip(squares, tensors, strict=True):
                parts = [tensor[piece.start : piece.end] for piece in self.pieces]
                row.index_add_(0, numbers, norms_of(parts).square())
        exchanged = squares.to(self.device)
        if self.is_partition:
            dist.all_reduce(exchanged, group=self.group)
        if self.grid is not None:
            exchanged[:, self.sharded] = self.grid.sum(exchanged[:, self.sharded])
        return exchanged.to(squares.device).sqrt()

    def scale(self, tensor: Tensor, factors: Tensor) -> None:
        """Multiplies the pieces of a flat tensor by the factors [count] of their tensors."""
        for piece in self.pieces:
            tensor[piece.start : piece.end].mul_(factors[piece.number])


def layouts_of(parameters: Sequence[nn.Parameter]) -> dict[Tensor, TensorLayout]:
    """Returns the layouts of unpartitioned parameters: one tensor each, or one tensor for each local expert."""
    return {
        parameter: TensorLayout(
            _pieces([parameter], [0], (0, parameter.numel())),
            _tensors(parameter),
            parameter.device,
            **_sharded([parameter]),
        )
        for parameter in parameters
    }


def layouts_in_zero(zero: Any) -> Mapping[Tensor, TensorLayout]:
    """Returns the layouts of the flat partitions of DeepSpeed's optimizer for ZeRO stages 1 and 2."""
    layouts: dict[Tensor, TensorLayout] = {}
    for flat, parameters, offsets, begin, group in partitions(zero):
        layouts[flat] = TensorLayout(
            _pieces(parameters, offsets, (begin, begin + flat.numel())),
            sum(map(_tensors, parameters)),
            parameters[0].device,
            group,
            is_partition=True,
            **_sharded(parameters),
        )
    return layouts


def _tensors(parameter: nn.Parameter) -> int:
    return len(parameter) if hasattr(parameter, "num_global_experts") else 1


def _sharded(parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """Returns the fields ``sharded`` and ``grid`` of a layout of these parameters."""
    shards: dict[int, Shard] = {}
    number = 0
    for parameter in parameters:
        if hasattr(parameter, "shard"):
            shards[number] = parameter.shard
        number += _tensors(parameter)
    return {"sharded": list(shards), "grid": next((shard.grid for shard in shards.values()), None)}


def _pieces(parameters: Sequence[nn.Parameter], offsets: Sequence[int], part: tuple[int, int]) -> list[Piece]:
    """Returns the pieces in the range ``part`` of a flat tensor, for parameters at these ``offsets``."""
    pieces = []
    number = 0
    for parameter, offset in zip(parameters, offsets, strict=True):
        tensors = _tensors(parameter)
        numel = parameter.numel() // tensors
        for index in range(tensors):
            start = max(part[0], offset + index * numel)
            end = min(part[1], offset + (index + 1) * numel)
            if start < end:
                pieces.append(Piece(start - part[0], end - part[0], number))
            number += 1
    return pieces


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
