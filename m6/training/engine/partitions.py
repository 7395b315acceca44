"""The part of a parameter on this rank: all of it, a partition of ZeRO stage 3, or the local experts of a stack.

Also takes gradients from DeepSpeed, and gives sums back to it; written for DeepSpeed 0.19.8.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.training.reduction.messages import BUCKET_ELEMENTS


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO stage 3 partitions the parameter over all ranks."""
    return hasattr(parameter, "ds_tensor")


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether the parameter holds local experts of a stack. DeepSpeed averages it only over ranks with the same."""
    return not getattr(parameter, "allreduce", True)


def is_divided(parameter: nn.Parameter) -> bool:
    """Whether other ranks hold other parts of the parameter: experts, or parts of a sharded matrix."""
    return is_expert(parameter) or hasattr(parameter, "shard")


def full_numel(parameter: nn.Parameter) -> int:
    """The number of elements of the parameter without ZeRO's partitioning."""
    numel: int = getattr(parameter, "ds_numel", parameter.numel())
    return numel


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of the parameter without ZeRO's partitioning."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def partition(parameter: nn.Parameter) -> Tensor:
    """Stage 3: this rank's elements, 1-D, without the padding to equal lengths."""
    padded: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    return padded[: partition_numel(parameter, padded.numel())]


def partition_numel(parameter: nn.Parameter, padded_numel: int) -> int:
    """Stage 3: the number of this rank's ``padded_numel`` elements without padding."""
    return max(0, min(padded_numel, full_numel(parameter) - padded_numel * dist.get_rank()))


def local_part(parameter: nn.Parameter) -> Tensor:
    """The elements of the parameter on this rank, 1-D."""
    return partition(parameter) if is_partitioned(parameter) else parameter.detach().reshape(-1)


def take_gradient(parameter: nn.Parameter) -> Tensor:
    """Moves the gradient of a parameter out of the model, in fp32; zeros if the model did not use the parameter."""
    # At stage 1 DeepSpeed may have moved a 16-bit gradient to an fp32 one.
    gradient = getattr(parameter, "grad_accum", None)
    gradient = parameter.grad if gradient is None else gradient
    parameter.grad = None
    if hasattr(parameter, "grad_accum"):
        parameter.grad_accum = None
    return torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.float()


def give_partition(zero: Any, gradients: dict[nn.Parameter, Tensor]) -> list[Tensor]:
    """Stores this rank's partition of whole gradients in DeepSpeed's stage-1 optimizer, and returns the partition."""
    for index, parameters in enumerate(zero.params_in_partition):
        dtype = zero.gradient_accumulation_dtype
        zero.all_grad_tensors[index] = [gradients[parameter].to(dtype) for parameter in parameters]
        zero.averaged_gradients[index] = zero.get_flat_partition(
            parameters,
            zero.first_offset[index],
            zero.partition_size[index],
            dtype=dtype,
            device=zero.single_partition_of_fp32_groups[index].device,
            param_group_idx=index,
            return_tensor_list=True,
        )
        zero.all_grad_tensors[index] = None
    return [gradient for group in zero.averaged_gradients.values() for gradient in group]


def scatter_sums(zero: Any, sent_type: torch.dtype | None) -> None:
    """Sums gradients over ranks, and stores this rank's partition of the sums in DeepSpeed's stage-1 optimizer.

    A reduce-scatter sends half the bytes of an all-reduce. The gradients leave the parameters.

    Args:
        sent_type: the number format of messages; None: the type of the parameters.
    """
    for index, parameters in enumerate(zero.round_robin_bit16_groups):
        group, numel = zero.real_dp_process_group[index], int(zero.partition_size[index])
        ranks = dist.get_world_size(group)
        dtype = zero.gradient_accumulation_dtype
        partition = torch.empty(numel, dtype=dtype, device=parameters[0].device)
        offsets = zero.round_robin_bit16_offsets[index]
        step = max(1, BUCKET_ELEMENTS // ranks)
        for begin in range(0, numel, step):
            own = partition[begin : begin + step]
            rows = torch.zeros(ranks, own.numel(), dtype=sent_type or parameters[0].dtype, device=own.device)
            for rank, row in enumerate(rows):
                _read_gradients(parameters, offsets, rank * numel + begin, row)
            total = rows[0]
            if ranks > 1:
                total = torch.empty_like(rows[0])
                dist.reduce_scatter_single(total, rows.flatten(), group=group)
            own.copy_(total)
        zero.averaged_gradients[index] = [partition]
        for parameter in parameters:
            parameter.grad = None


def partition_pieces(zero: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields each parameter with elements in this rank's stage-1 partition, and the gradient of these elements."""
    for index, gradients in zero.averaged_gradients.items():
        [partition] = gradients
        begin = dist.get_rank(zero.real_dp_process_group[index]) * partition.numel()
        parameters, offsets = zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index]
        for parameter, _, start, end in _overlaps(parameters, offsets, begin, begin + partition.numel()):
            yield parameter, partition[start - begin : end - begin]


def _read_gradients(parameters: Sequence[nn.Parameter], offsets: Sequence[int], begin: int, row: Tensor) -> None:
    """Copies the elements from ``begin`` on of the flat gradient into ``row``.

    Padding and parameters without a gradient are skipped.
    """
    for parameter, offset, start, end in _overlaps(parameters, offsets, begin, begin + row.numel()):
        if parameter.grad is not None:
            row[start - begin : end - begin] = parameter.grad.reshape(-1)[start - offset : end - offset]


def _overlaps(
    parameters: Sequence[nn.Parameter], offsets: Sequence[int], begin: int, end: int
) -> Iterator[tuple[nn.Parameter, int, int, int]]:
    """Yields each parameter between ``begin`` and ``end`` of a flat tensor, its offset, and its range between them."""
    first, last = max(0, bisect.bisect_right(offsets, begin) - 1), bisect.bisect_left(offsets, end)
    for parameter, offset in zip(parameters[first:last], offsets[first:last], strict=True):
        start, stop = max(begin, offset), min(end, offset + parameter.numel())
        if start < stop:
            yield parameter, offset, start, stop
