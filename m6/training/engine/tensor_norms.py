"""Norms of tensors, also of whole ones where ZeRO's flat partitions cut them: one number each crosses the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_CHUNK = 2**18  # elements; their copies in fp64 stay in a processor's cache


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each tensor, [N] in fp64.

    On CPUs PyTorch 2.13 adds up the squares of fp32 numbers in fp32, one after the other: 10^8 equal ones lose 1 % of
    their norm, and another share when they are cut elsewhere. So they are added up in fp64 there, as DeepSpeed does. On
    other devices sums are trees of fp32, also those of fp16 numbers, whose squares can be beyond their range.

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
    """A range of a flat tensor that belongs to one tensor of the model, or to one expert of a stack.

    Attributes:
        start, end: in the flat tensor.
        number: of the tensor.
    """

    start: int
    end: int
    number: int


@dataclass(frozen=True)
class TensorLayout:
    """The tensors of which a flat tensor has parts.

    Attributes:
        pieces: the parts.
        count: number of tensors, over all ranks of the group.
        device: where numbers are exchanged.
        group: the ranks that have the other parts.
        is_partition: whether there are other parts.
    """

    pieces: Sequence[Piece]
    count: int
    device: torch.device
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    is_partition: bool = False

    def norms(self, *tensors: Tensor) -> Tensor:
        """[N, count] in fp64: the norms of the parts of N flat tensors; all ranks of the group call it."""
        squares = tensors[0].new_zeros(len(tensors), self.count, dtype=torch.float64)
        if self.pieces:
            numbers = torch.tensor([piece.number for piece in self.pieces], device=squares.device)
            for row, tensor in zip(squares, tensors, strict=True):
                parts = [tensor[piece.start : piece.end] for piece in self.pieces]
                row.index_add_(0, numbers, norms_of(parts).square())
        if self.is_partition:
            exchanged = squares.to(self.device)
            dist.all_reduce(exchanged, group=self.group)
            squares = exchanged.to(squares.device)
        return squares.sqrt()

    def scale(self, tensor: Tensor, factors: Tensor) -> None:
        """Multiplies the parts of a flat tensor by the factors [count] of their tensors."""
        for piece in self.pieces:
            tensor[piece.start : piece.end].mul_(factors[piece.number])


def layouts_of(parameters: Sequence[nn.Parameter]) -> dict[Tensor, TensorLayout]:
    """The layouts of parameters that are not partitioned: one tensor, or one for each local expert."""
    return {
        parameter: TensorLayout(
            _pieces([parameter], [0], (0, parameter.numel())), _tensors(parameter), parameter.device
        )
        for parameter in parameters
    }


def layouts_in_zero(zero: Any) -> Mapping[Tensor, TensorLayout]:
    """The layouts of the flat partitions of DeepSpeed 0.19.8's optimizer for ZeRO stages 1 and 2."""
    layouts: dict[Tensor, TensorLayout] = {}
    for index, flat in enumerate(zero.single_partition_of_fp32_groups):
        parameters, offsets = zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index]
        group = zero.real_dp_process_group[index]
        begin = dist.get_rank(group) * flat.numel()
        layouts[flat] = TensorLayout(
            _pieces(parameters, offsets, (begin, begin + flat.numel())),
            sum(map(_tensors, parameters)),
            parameters[0].device,
            group,
            is_partition=True,
        )
    return layouts


def _tensors(parameter: nn.Parameter) -> int:
    return len(parameter) if hasattr(parameter, "num_global_experts") else 1


def _pieces(parameters: Sequence[nn.Parameter], offsets: Sequence[int], part: tuple[int, int]) -> list[Piece]:
    """The pieces in elements ``part`` of a flat tensor in which the parameters begin at ``offsets``."""
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
