"""The coordinates of a rank, and every process group of a run.

The names are those of torchtitan's ``ParallelDims`` and PyTorch's ``DeviceMesh``: ``pp`` stages of a pipeline, ``dp``
replicas with different micro-batches, ``tp`` parts of matrices, ``ep`` parts of the experts. A rank's number is
``(pp_rank * dp + dp_rank) * tp + tp_rank``; ``ep`` divides the ranks of a stage, ``dp * tp``, into neighbours. No other
file makes groups or computes with ranks; a test checks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe.process_groups import group_of

if TYPE_CHECKING:
    from m6.config.run import RunConfig

GroupKind = Literal["expert_parallel", "expert_data_parallel"]

_expert_shapes: WeakKeyDictionary[dist.ProcessGroup, tuple[int, int]] = WeakKeyDictionary()
"""By the group of all ranks: ``pp`` and ``tp`` of the last engine, for which DeepSpeed has made groups of experts."""
_meshes: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ParallelDims], DeviceMesh]] = WeakKeyDictionary()
"""By the group of all ranks: an engine that is built again gets the groups of the first one."""


@dataclass(frozen=True)
class ParallelDims:
    """The sizes of a run's dimensions, and this rank's coordinates.

    Attributes:
        rank, world_size: see ``Runtime``.
        pp: ranks of a pipeline; they read the same micro-batches.
        tp: ranks of a tensor group, nearest neighbours; they read the same micro-batches. In a layer of experts each
            computes a part of the tokens.
        ep: neighbours in a stage; together they hold all experts.
    """

    rank: int
    world_size: int
    pp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: RunConfig, rank: int, world_size: int) -> ParallelDims:
        """The dimensions of a run, at one of its ranks."""
        return cls(rank, world_size, config.pipeline_size, config.tensor_size, config.m6.training.ep_size)

    @property
    def dp(self) -> int:
        """Number of copies of the model. Each reads micro-batches of its own."""
        return self.world_size // (self.pp * self.tp)

    @property
    def dp_rank(self) -> int:
        """The number of this rank's copy of the model, and so of its micro-batches."""
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
    def edp(self) -> int:
        """Groups of ``ep`` ranks among those of ``dp``: copies of each expert of a stage without tensor groups."""
        return self.dp // self.ep

    @property
    def model_rank(self) -> int:
        """The number of this rank among the ranks of one copy of the model."""
        return self.pp_rank * self.tp + self.tp_rank

    @property
    def reads_first(self) -> bool:
        """Whether this rank counts its micro-batches, for sums with each micro-batch once."""
        return self.model_rank == 0

    def rank_of_stage(self, pp_rank: int) -> int:
        """The global rank at another place of this rank's pipeline."""
        return (pp_rank * self.dp + self.dp_rank) * self.tp + self.tp_rank

    def part(self, ranks_per_part: int) -> tuple[int, int]:
        """The number of this rank's part of a step, shared by so many neighbours in ``dp``, and its place there."""
        return divmod(self.dp_rank, ranks_per_part)

    def share(self, numel: int) -> tuple[int, int]:
        """Begin and end of this rank's part of ``numel`` elements, divided among the ranks of its stage."""
        ranks = self.dp * self.tp
        place = self.rank % ranks
        return numel * place // ranks, numel * (place + 1) // ranks

    def stages(self) -> list[list[int]]:
        """The global ranks with each part of the layers, also those with other parts of its matrices."""
        ranks = self.dp * self.tp
        return [list(range(first, first + ranks)) for first in range(0, self.world_size, ranks)]

    def ranks(self, dim: Literal["pp", "dp", "tp"]) -> list[list[int]]:
        """The global ranks of all groups along a dimension, each in the order of its places."""
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        strides = {"pp": self.dp * self.tp, "dp": self.tp, "tp": 1}
        size, stride = sizes[dim], strides[dim]
        firsts = [rank for rank in range(self.world_size) if rank // stride % size == 0]
        return [list(range(first, first + size * stride, stride)) for first in firsts]


class Mesh:
    """The process groups of a run; every rank makes it. Its ``get_`` methods are the ``mpu`` of DeepSpeed 0.19.8.

    The groups along ``pp``, ``dp`` and ``tp`` are those of PyTorch's ``DeviceMesh``. DeepSpeed makes the groups of
    experts inside of each stage, see ``install``; ``moe`` makes the groups for the exchange of tokens.

    Args:
        dims: of this rank.
        device: of the tensors that the groups exchange.

    Attributes:
        dims, device: see above.
        device_mesh: with ``dp``, and with ``pp`` and ``tp`` if they are larger than 1.
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
        """Whether a rank has only a part of the model, beside its part of the experts."""
        return self.dims.pp * self.dims.tp > 1

    @property
    def model(self) -> dist.ProcessGroup:
        """The ranks of a pipeline, or of a tensor group where there is no pipeline.

        Where there are both, a pipeline has the ranks with the same part of matrices.
        """
        return self.device_mesh.get_group("pp" if self.dims.pp > 1 else "tp")

    @property
    def tensor(self) -> dist.ProcessGroup | None:
        """The ranks of a tensor group; None: a rank has whole matrices."""
        return self.device_mesh.get_group("tp") if self.dims.tp > 1 else None

    def stage(self) -> dist.ProcessGroup | None:
        """The ranks with the same layers, also those with other parts of matrices; None: all. All ranks call it."""
        return None if self.dims.pp == 1 else own_group(self.dims.stages(), "stage")

    @property
    def stage_ends(self) -> tuple[int, int]:
        """The global ranks of the first and the last place of this rank's pipeline."""
        return self.dims.rank_of_stage(0), self.dims.rank_of_stage(self.dims.pp - 1)

    def of_pipelines(self, purpose: str) -> dist.ProcessGroup | None:
        """This rank's pipeline with a communicator for one purpose. All ranks call it.

        NCCL runs the messages of a group one after the other. A message can overtake another one only in another group.
        """
        return self._formed(self.dims.ranks("pp"), purpose)

    def of_ends(self, purpose: str) -> dist.ProcessGroup | None:
        """The first and the last rank of this rank's pipeline, None on the others. All ranks call it."""
        return self._formed([[ranks[0], ranks[-1]] for ranks in self.dims.ranks("pp")], purpose)

    def own_group(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """This rank's group among those of a grid inside of tensor groups. All ranks call it with all groups."""
        return own_group(groups, "tensor")

    def install(self) -> Mesh | None:
        """Makes this DeepSpeed's ``mpu`` if a rank has a part of the model, and returns it.

        Called before experts are split: DeepSpeed then makes their groups among the ranks of one stage.
        """
        from deepspeed.utils import groups

        groups.mpu = self if self.is_divided else None
        world, shape = dist.group.WORLD, (self.dims.pp, self.dims.tp)
        assert world is not None
        if _expert_shapes.get(world, shape) != shape:
            # DeepSpeed 0.19.8 would find the groups of an engine with other stages by the same name.
            for name in ("EXPERT_PARALLEL", "EXPERT_DATA_PARALLEL"):
                getattr(groups, f"_{name}_GROUP").clear()
                getattr(groups, f"_{name}_GROUP_RANKS").clear()
        _expert_shapes[world] = shape
        return self if self.is_divided else None

    # What DeepSpeed asks

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks of ZeRO's partitions."""
        return self.replicas

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self.dims.dp

    def get_data_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.dims.dp_rank

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks of the other parts of the model."""
        return self.model

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self.dims.pp * self.dims.tp

    def get_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.dims.model_rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Ranks of a pipeline: DeepSpeed makes groups of experts in each of them."""
        return self.dims.pp

    def get_tensor_model_parallel_world_size(self) -> int:
        """Ranks of a division of single matrices."""
        return self.dims.tp

    def get_tensor_model_parallel_rank(self) -> int:
        """This rank's number among them."""
        return self.dims.tp_rank

    def _formed(self, groups: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup | None:
        group = own_group(groups, purpose)
        if group is not None:
            self._form(group)
        return group

    def _form(self, group: dist.ProcessGroup) -> None:
        # Now, when all ranks are at one place; NCCL would form the communicator at the first collective.
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)


def own_group(groups: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup | None:
    """Makes all groups for a purpose, as torch.distributed wants it, and returns this rank's."""
    made = [group_of(ranks, purpose) for ranks in groups]
    return next((group for group in made if group is not None), None)


def expert_group(kind: GroupKind, ep_size: int) -> dist.ProcessGroup | None:
    """One of DeepSpeed's process groups of this rank.

    Args:
        kind: ``expert_parallel``: ranks with all experts together; ``expert_data_parallel``: ranks with the same
            experts.
        ep_size: number of ranks with all experts together.

    Returns:
        None if ep_size is 1 and there are no tensor groups. There is then no expert-parallel group, and all ranks hold
        the same experts: as an argument of a collective, None means all ranks. In tensor groups the ranks with the same
        experts have other tokens, but not other micro-batches, so that experts have groups of their own.
    """
    from deepspeed.utils import groups

    if ep_size == 1 and f"ep_size_{ep_size}" not in groups._get_expert_parallel_group_dict():
        return None
    return named_expert_group(kind, f"ep_size_{ep_size}")


def named_expert_group(kind: GroupKind, name: str) -> dist.ProcessGroup:
    """A process group of this rank; ``name`` is the ``group_name`` of an expert's parameter."""
    from deepspeed.utils import groups

    group: dist.ProcessGroup = getattr(groups, f"_get_{kind}_group")(name)
    return group


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
