"""The process groups of a pipeline, and what DeepSpeed asks about them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from m6.training.places import Places


class PipelineGroups:
    """Groups of ranks; the methods are those of the ``mpu`` that DeepSpeed 0.19.8 calls.

    Every rank makes this object, and gives it to ``deepspeed.utils.groups`` before experts are split: DeepSpeed then
    makes the groups of experts inside of the ranks that hold the same stages.

    Args:
        places: of this rank.
        device: on which the groups exchange tensors.

    Attributes:
        replicas: the ranks that hold the same stages and read other micro-batches.
        pipeline: the ranks of this pipeline, in the order of their places.
        ends: its first and its last rank; None on the others.
        first, last: the global ranks of the two.
    """

    def __init__(self, places: Places, device: torch.device) -> None:
        self.places = places
        self.replicas = own_group(places.replicas(), places.rank)
        pipelines = places.pipelines()
        self.pipeline = own_group(pipelines, places.rank)
        self.first, self.last = pipelines[places.data_rank][0], pipelines[places.data_rank][-1]
        ends = own_group([[ranks[0], ranks[-1]] for ranks in pipelines], places.rank)
        self.ends = ends if places.rank in (self.first, self.last) else None
        # A communicator of NCCL forms at its first collective. Here all ranks are at the same place.
        for group in (self.replicas, self.pipeline, self.ends):
            if group is not None:
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
        """The ranks that hold the other stages."""
        return self.pipeline

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self.places.pipeline_size

    def get_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.places.pipeline_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Ranks of a pipeline: DeepSpeed makes groups of experts in each of them."""
        return self.places.pipeline_size

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks that divide single matrices: no matrix is divided."""
        return 1

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return 0


def own_group(groups: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Makes all groups, as torch.distributed wants it, and returns the one of this rank."""
    own = None
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return own
