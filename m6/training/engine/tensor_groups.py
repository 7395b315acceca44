"""The process groups of divided matrices, and what DeepSpeed asks about them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from m6.training.engine.pipeline_groups import own_group
from m6.training.places import Places


class TensorGroups:
    """Groups of ranks; the methods are those of the ``mpu`` that DeepSpeed 0.19.8 calls.

    Every rank makes this object, and gives it to ``deepspeed.utils.groups``. DeepSpeed then reduces gradients and
    partitions over ``replicas``, and sums up the norm over ``tensor``: of divided matrices on each of its ranks, of
    whole ones on the first.

    Args:
        places: of this rank.
        device: on which the groups exchange tensors.

    Attributes:
        replicas: the ranks that hold the same parts of matrices and read other micro-batches.
        tensor: the ranks that together hold whole matrices and read the same micro-batches.
    """

    def __init__(self, places: Places, device: torch.device) -> None:
        self.places = places
        self.replicas = own_group(places.replicas(), places.rank)
        self.tensor = own_group(places.tensor_groups(), places.rank)
        # A communicator of NCCL forms at its first collective. Here all ranks are at the same place.
        for group in (self.replicas, self.tensor):
            dist.all_reduce(torch.zeros(1, device=device), group=group)

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
        """The ranks that hold the other parts of matrices."""
        return self.tensor

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self.places.tensor_size

    def get_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.places.tensor_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Ranks of a pipeline: there is none."""
        return 1

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks that divide single matrices."""
        return self.places.tensor_size

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.places.tensor_rank
