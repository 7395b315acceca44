"""The part of a parameter on this rank: all of it, a partition of ZeRO stage 3, or the local experts of a stack."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn


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
