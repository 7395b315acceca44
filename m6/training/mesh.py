"""The coordinates of a rank, and every process group of a run.

The names follow torchtitan's ``ParallelDims`` and PyTorch's ``DeviceMesh``: ``pp`` stages of a pipeline, ``dp``
replicas with different micro-batches, ``tp`` parts of matrices, ``ep`` parts of the experts. A rank's number is
``(pp_rank * dp + dp_rank) * tp + tp_rank``; ``ep`` divides the ranks of a stage, ``dp * tp``, into neighbours. No other
file makes groups or computes with ranks; a test checks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from m6.runs.environment import ranks_per_node
from m6.training.deepspeed_private import install_mpu
from m6.training.reduction.collectives import NodeGroups
from moe.process_groups import group_of

if TYPE_CHECKING:
    from m6.config.run import RunConfig

_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ParallelDims], DeviceMesh]] = WeakKeyDictionary()
"""Group of all ranks -> meshes. A second engine in the process reuses the groups of the first."""


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of a run's dimensions, and this rank's coordinates.

    Attributes:
        rank, world_size: see ``Runtime``.
        pp: the number of ranks of a pipeline; they read the same micro-batches.
        tp: the number of ranks of a tensor group, nearest neighbours; they read the same micro-batches. In a layer of
            experts each computes a part of the tokens.
        ep: the number of ranks of an expert-parallel group, neighbours in a stage; together they hold all experts.
    """

    rank: int
    world_size: int
    pp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: RunConfig, rank: int, world_size: int) -> ParallelDims:
        """Returns the dimensions of a run, with the coordinates of one rank."""
        return cls(rank, world_size, config.pipeline_size, config.tensor_size, config.m6.training.ep_size)

    @property
    def dp(self) -> int:
        """The number of copies of the model. Each copy reads its own micro-batches."""
        return self.world_size // (self.pp * self.tp)

    @property
    def dp_rank(self) -> int:
        """The data-parallel rank: the number of this rank's copy of the model."""
        return self.rank // self.tp % self.dp

    @property
    def pp_rank(self) -> int:
        """The number of this rank in its pipeline."""
        return self.rank // (self.dp * self.tp)

    @property
    def tp_rank(self) -> int:
        """The number of this rank in its tensor group."""
        return self.rank % self.tp

    @property
    def model_rank(self) -> int:
        """The number of this rank among the ranks of one copy of the model."""
        return self.pp_rank * self.tp + self.tp_rank

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank counts its micro-batches. In sums over these ranks, each micro-batch counts once."""
        return self.model_rank == 0

    def rank_of_stage(self, pp_rank: int) -> int:
        """Returns the global rank at the position ``pp_rank`` of this rank's pipeline."""
        return (pp_rank * self.dp + self.dp_rank) * self.tp + self.tp_rank

    def part(self, ranks_per_part: int) -> tuple[int, int]:
        """Returns the number of this rank's part of a step, and its position among the neighbours with this part."""
        return divmod(self.dp_rank, ranks_per_part)

    def share(self, numel: int) -> tuple[int, int]:
        """Returns begin and end of this rank's part of ``numel`` elements, divided among the ranks of its stage."""
        ranks = self.dp * self.tp
        place = self.rank % ranks
        return numel * place // ranks, numel * (place + 1) // ranks

    def stages(self) -> list[list[int]]:
        """Returns the global ranks of each pipeline stage, including all ranks of its tensor groups."""
        ranks = self.dp * self.tp
        return [list(range(first, first + ranks)) for first in range(0, self.world_size, ranks)]

    def copies_of_experts(self) -> list[list[int]]:
        """Returns the global ranks of all groups with the same experts, each in order."""
        return [stage[place :: self.ep] for stage in self.stages() for place in range(self.ep)]

    def ranks(self, dim: Literal["pp", "dp", "tp"]) -> list[list[int]]:
        """Returns the global ranks of all groups along a dimension, each in order."""
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        strides = {"pp": self.dp * self.tp, "dp": self.tp, "tp": 1}
        size, stride = sizes[dim], strides[dim]
        firsts = [rank for rank in range(self.world_size) if rank // stride % size == 0]
        return [list(range(first, first + size * stride, stride)) for first in firsts]


class Mesh:
    """The process groups of a run; every rank makes it. Its ``get_`` methods are the ``mpu`` of DeepSpeed 0.19.8.

    The groups along ``pp``, ``dp`` and ``tp`` come from PyTorch's ``DeviceMesh``. DeepSpeed makes the groups of
    experts inside each stage, see ``install``; ``moe`` makes the groups of its exchange of tokens.

    Args:
        dims: of this rank.
        device: of the tensors in collectives.

    Attributes:
        dims, device: the arguments.
        device_mesh: with the dimension ``dp``, and with ``pp`` and ``tp`` if they are larger than 1.
        replicas: the ranks along ``dp``, with the same part of the model; None: all ranks of the run.
    """

    def __init__(self, dims: ParallelDims, device: torch.device) -> None:
        self.dims, self.device = dims, device
        self.device_mesh = _device_mesh(dims, device)
        self.replicas = self.device_mesh.get_group("dp") if self.is_divided else None
        for name in self.device_mesh.mesh_dim_names or ():
            if self.is_divided:
                self._form(self.device_mesh.get_group(name))

    @property
    def is_divided(self) -> bool:
        """Whether pipeline stages or tensor groups divide the model. Expert parallelism does not count."""
        return self.dims.pp * self.dims.tp > 1

    @property
    def model(self) -> dist.ProcessGroup:
        """The ranks of a pipeline, or of a tensor group if there is no pipeline.

        If there are both, the ranks of a pipeline have the same part of the matrices.
        """
        return self.device_mesh.get_group("pp" if self.dims.pp > 1 else "tp")

    @property
    def tensor(self) -> dist.ProcessGroup | None:
        """The ranks of a tensor group; None: a rank has whole matrices."""
        return self.device_mesh.get_group("tp") if self.dims.tp > 1 else None

    def stage(self) -> dist.ProcessGroup | None:
        """Returns the ranks of this rank's stage, including all its tensor groups; None: all. All ranks call it."""
        return None if self.dims.pp == 1 else own_group(self.dims.stages(), "stage")

    @property
    def stage_ends(self) -> tuple[int, int]:
        """The first and the last global rank of this rank's pipeline."""
        return self.dims.rank_of_stage(0), self.dims.rank_of_stage(self.dims.pp - 1)

    def of_pipelines(self, purpose: str) -> dist.ProcessGroup | None:
        """Returns this rank's pipeline with a communicator for one purpose. All ranks call it.

        NCCL runs the messages of a group one after the other. A message can overtake only messages of other groups.
        """
        return self._formed(self.dims.ranks("pp"), purpose)

    def of_ends(self, purpose: str) -> dist.ProcessGroup | None:
        """Returns the group of the first and the last rank of this pipeline; None on other ranks. All ranks call it."""
        return self._formed([[ranks[0], ranks[-1]] for ranks in self.dims.ranks("pp")], purpose)

    def own_group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Returns this rank's group among the groups of a grid inside tensor groups. All ranks pass all groups."""
        return own_group(groups, "tensor")

    def by_nodes(self, groups: Sequence[Sequence[int]]) -> NodeGroups | None:
        """Returns the ranks of this rank's group among ``groups``, by nodes. All ranks pass all groups.

        Returns:
            None if nodes do not have the same number of ranks, or if a group has no two ranks on a node or lies on one.
        """
        # Launchers may tell ranks on other nodes other numbers.
        own = ranks_per_node(self.dims.world_size)
        extremes = torch.tensor([own, -own], device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if int(extremes[0]) != -int(extremes[1]):
            return None
        divided = [divide_by_nodes(ranks, own) for ranks in groups]
        if not all(divided):
            return None
        inside = self._formed([ranks for nodes in divided for ranks in nodes], "node")
        between = self._formed([ranks for nodes in divided for ranks in zip(*nodes, strict=True)], "nodes")
        nodes = next(nodes for nodes in divided if any(self.dims.rank in ranks for ranks in nodes))
        number = next(number for number, ranks in enumerate(nodes) if self.dims.rank in ranks)
        assert inside is not None
        assert between is not None
        return NodeGroups(number, len(nodes[0]), inside, between)

    def ring_between_nodes(self, groups: Sequence[Sequence[int]]) -> float:
        """Returns the share of the ranks of this rank's group among ``groups`` whose next one is on another node."""
        ranks = next(ranks for ranks in groups if self.dims.rank in ranks)
        return share_between_nodes(ranks, ranks_per_node(self.dims.world_size))

    def install(self) -> Mesh | None:
        """Makes this object DeepSpeed's ``mpu`` if the model is divided, and returns it; otherwise None.

        Call it before experts are split: DeepSpeed then makes the groups of experts among the ranks of one stage.
        """
        mpu = self if self.is_divided else None
        install_mpu(mpu, (self.dims.pp, self.dims.tp))
        return mpu

    # DeepSpeed's mpu interface

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks of ZeRO's partitions."""
        return self.replicas

    def get_data_parallel_world_size(self) -> int:
        """The number of ranks of the data-parallel group."""
        return self.dims.dp

    def get_data_parallel_rank(self) -> int:
        """This rank's number in the data-parallel group."""
        return self.dims.dp_rank

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks with the other parts of the model."""
        return self.model

    def get_model_parallel_world_size(self) -> int:
        """The number of parts of the model, without expert parallelism."""
        return self.dims.pp * self.dims.tp

    def get_model_parallel_rank(self) -> int:
        """The number of this rank's part of the model."""
        return self.dims.model_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """The number of ranks of a pipeline: DeepSpeed makes groups of experts among the ranks at each position."""
        return self.dims.pp

    def get_tensor_model_parallel_world_size(self) -> int:
        """The number of ranks of a tensor group."""
        return self.dims.tp

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's number in its tensor group."""
        return self.dims.tp_rank

    def _formed(self, groups: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup | None:
        group = own_group(groups, purpose)
        if group is not None:
            self._form(group)
        return group

    def _form(self, group: dist.ProcessGroup) -> None:
        # All ranks are at the same point now. Otherwise NCCL would form the communicator at the first collective.
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)


def divide_by_nodes(ranks: Sequence[int], per_node: int) -> list[list[int]]:
    """Returns global ranks by nodes with ``per_node`` ranks; empty if the nodes have unequal numbers, one, or all."""
    nodes = [list(each) for _, each in itertools.groupby(ranks, lambda rank: rank // per_node)]
    sizes = {len(each) for each in nodes}
    return nodes if len(nodes) > 1 and len(sizes) == 1 and sizes != {1} else []


def share_between_nodes(ranks: Sequence[int], per_node: int) -> float:
    """Returns the share of global ranks whose next one in a ring is on another node, with ``per_node`` ranks a node."""
    following = [*ranks[1:], *ranks[:1]]
    return sum(a // per_node != b // per_node for a, b in zip(ranks, following, strict=True)) / len(ranks)


def own_group(groups: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup | None:
    """Makes all groups for a purpose and returns this rank's. In torch.distributed all ranks must make all groups."""
    made = [group_of(ranks, purpose) for ranks in groups]
    return next((group for group in made if group is not None), None)


def _device_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialized"
    made, key = _meshes.setdefault(world, {}), (device.type, dims)
    if key not in made:
        sizes = {name: size for name, size in (("pp", dims.pp), ("dp", dims.dp), ("tp", dims.tp)) if size > 1}
        sizes.setdefault("dp", 1)
        sizes = {name: sizes[name] for name in ("pp", "dp", "tp") if name in sizes}
        made[key] = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return made[key]
