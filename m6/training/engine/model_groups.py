"""The process groups of a model that is divided over ranks, and what DeepSpeed asks about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from m6.training.places import Places
from moe.process_groups import group_of


class ModelGroups:
    """Groups of ranks; the methods are those of the ``mpu`` that DeepSpeed 0.19.8 calls.

    Every rank makes this object, and gives it to ``deepspeed.utils.groups``.

    Args:
        places: of this rank.
        models: the global ranks that together hold each copy of the model and read the same micro-batches.
        device: on which the groups exchange tensors.

    Attributes:
        replicas: the ranks that hold the same part of the model and read other micro-batches.
        model: the ranks that hold the other parts, in the order of their places.
    """

    def __init__(self, places: Places, models: Sequence[Sequence[int]], device: torch.device) -> None:
        self.places = places
        self.replicas = own_group(places.replicas(), "replicas")
        self.model = own_group(models, "model")
        for group in (self.replicas, self.model):
            form(group, device)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks over which ZeRO partitions."""
        return self.replicas

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self.places.data_size

    def get_data_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.places.data_rank

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other parts of the model."""
        return self.model

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self.places.pipeline_size * self.places.tensor_size

    def get_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.places.pipeline_rank * self.places.tensor_size + self.places.tensor_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Ranks of a pipeline: DeepSpeed makes groups of experts in each of them."""
        return self.places.pipeline_size

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks that divide single matrices."""
        return self.places.tensor_size

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.places.tensor_rank


def own_group(groups: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup | None:
    """Makes all groups for a purpose, as torch.distributed wants it, and returns the one of this rank."""
    made = [group_of(ranks, purpose) for ranks in groups]
    return next((group for group in made if group is not None), None)


def form(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Forms the communicator of a group now, when all ranks are at one place; NCCL would at the first collective."""
    if group is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
