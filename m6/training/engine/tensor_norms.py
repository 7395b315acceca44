"""Norms of tensors, also of tensors split by ZeRO's flat partitions, or sharded over the ranks of a tensor group.

Ranks exchange one number for each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.model.placements import Grid, Shard
from m6.training.deepspeed_private import partitions

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
