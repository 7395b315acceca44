"""The training state of an engine as named ranges of flat global tensors, for our checkpoints.

In every layout a rank holds contiguous ranges of the flattened fp32 weight and moments of each parameter: the whole
tensor at ZeRO stage 0, a partition at stages 1 to 3, and for experts the range of the local experts in the stack of all
experts. Name, kind and offset identify a range on any rank. Any layout can therefore read the ranges written by another
layout.

Parts of matrices that a tensor group divides are joined for a checkpoint, and divided again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.checkpoints.format import WEIGHT, Fragment
from m6.model.placements import Shard
from m6.training.deepspeed_private import (
    Piece,
    base_optimizer,
    full_shape,
    is_divided,
    is_expert,
    is_partitioned,
    named_expert_group,
    partition,
    partition_start,
    pieces,
)
from m6.training.mesh import Mesh

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


_Key = tuple[str, str]
"""Name and kind of a tensor, see ``Fragment``."""


class DividedMatrices:
    """Gathers sharded matrices for checkpoints, and shards them again.

    A fragment is one flat range of a whole matrix, but a shard of a matrix is many ranges. ``joined`` therefore gathers
    the matrices, and yields a range of each to every rank of the stage. ``take_back`` writes such ranges back into the
    shards.

    Unsharded parameters have copies with equal gradients on all ranks of a tensor group.

    Args:
        mesh: of this rank; all ranks make this object.
        module: the part of the model on this rank.

    Attributes:
        stage: the ranks with the same layers; None: all.
    """

    def __init__(self, mesh: Mesh, module: nn.Module) -> None:
        self._dims, self._device, self.stage = mesh.dims, mesh.device, mesh.stage()
        parameters = dict(module.named_parameters())
        self._shards: dict[str, Shard] = {
            name: parameter.shard for name, parameter in parameters.items() if hasattr(parameter, "shard")
        }
        self._copied = {name for name, parameter in parameters.items() if not is_divided(parameter)}
        self._copied |= {name for name, _ in module.named_buffers()}
        self._lent: dict[_Key, Fragment] = {}

    def forget(self) -> None:
        """Frees the ranges of ``joined``, after the checkpoint has been written."""
        self._lent.clear()

    def joined(self, fragments: Iterable[Fragment]) -> Iterator[Fragment]:
        """Yields the fragments of this rank, with ranges of whole matrices instead of shards.

        All ranks of the stage call it together.
        """
        self._lent.clear()
        parts: dict[_Key, list[Fragment]] = {}
        for fragment in fragments:
            if fragment.name in self._shards:
                parts.setdefault((fragment.name, fragment.kind), []).append(fragment)
            elif fragment.name in self._copied:
                index, count = fragment.replica
                yield replace(fragment, replica=(index * self._dims.tp + self._dims.tp_rank, count * self._dims.tp))
            else:
                yield fragment  # a tensor group has no copies of experts
        for key in self._keys(parts):
            whole = self._whole(key, parts.get(key, []))
            begin, end = self._dims.share(whole.numel())
            self._lent[key] = Fragment(*key, begin, whole.view(-1)[begin:end].clone(), tuple(whole.shape))
            yield self._lent[key]

    def take_back(self, fragments: Iterable[Fragment]) -> None:
        """Writes the ranges of ``joined`` into these fragments of shards. All ranks of the stage call it together."""
        lent, self._lent = self._lent, {}
        live: dict[_Key, list[Fragment]] = {}
        for fragment in fragments:
            live.setdefault((fragment.name, fragment.kind), []).append(fragment)
        for key, fragment in lent.items():
            whole = torch.zeros(fragment.shape, dtype=fragment.data.dtype, device=fragment.data.device)
            whole.view(-1)[fragment.offset : fragment.end] = fragment.data
            dist.all_reduce(whole, group=self.stage)
            part = self._shards[fragment.name].of(whole).reshape(-1)
            for target in live.get(key, []):
                target.data.copy_(part[target.offset : target.end])

    def _keys(self, parts: dict[_Key, list[Fragment]]) -> list[_Key]:
        """Returns the sharded tensors of the stage in a common order. ZeRO may give a rank no part of a tensor."""
        found: list[list[_Key]] = [[] for _ in range(dist.get_world_size(self.stage))]
        dist.all_gather_object(found, list(parts), group=self.stage)
        return sorted({key for keys in found for key in keys})

    def _whole(self, key: _Key, fragments: list[Fragment]) -> Tensor:
        """Gathers a whole tensor from the fragments of its shards on all ranks."""
        shard = self._shards[key[0]]
        whole = torch.zeros(shard.shape, device=self._device)
        place = shard.of(whole)
        part = torch.zeros(math.prod(place.shape), device=self._device)
        for fragment in fragments:
            if fragment.replica[0] == 0:  # each element comes from one rank
                part[fragment.offset : fragment.end] = fragment.data
        place.copy_(part.view_as(place))
        dist.all_reduce(whole, group=self.stage)
        return whole


def fragments(deepspeed: DeepSpeedEngine, replicas: dist.ProcessGroup | None) -> Iterator[Fragment]:
    """Yields every range of training state on this rank: weights, in fp32 where masters exist, and moments.

    The caller creates the optimizer's moments first (``create_moments``).

    Args:
        replicas: the ranks with the same dense parameters; None: all.
    """
    stage, state = deepspeed.zero_optimization_stage(), base_optimizer(deepspeed).state
    found = pieces(deepspeed) if stage > 0 else {}
    for name, parameter in deepspeed.module.named_parameters():
        location = _Location.of(name, parameter, replicas)
        if not parameter.requires_grad:
            yield from _frozen(location, parameter)
        elif stage == 0:
            yield from _unpartitioned(location, parameter, state[parameter])
        elif parameter in found:  # otherwise this rank has no element of the parameter
            yield from _partitioned(location, parameter, found[parameter], state[found[parameter].flat])
    for name, buffer in deepspeed.module.named_buffers():
        if name in deepspeed.module.state_dict(keep_vars=True):  # other buffers are not persistent
            yield Fragment(name, WEIGHT, 0, buffer.view(-1), tuple(buffer.shape), _replica(replicas))


@dataclass(frozen=True)
class _Location:
    """The position of a parameter's local tensor in the global tensor.

    Attributes:
        shape: shape of the global tensor.
        experts: the first expert of the local tensor and the number of all experts; None for other parameters.
        replica: see ``Fragment``.
    """

    name: str
    shape: tuple[int, ...]
    experts: tuple[int, int] | None
    replica: tuple[int, int]

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, replicas: dist.ProcessGroup | None) -> _Location:
        shape = full_shape(parameter)
        if not is_expert(parameter):
            return cls(name, shape, None, _replica(replicas))
        experts = (parameter.first_expert, parameter.num_global_experts)  # type: ignore[attr-defined]
        group = named_expert_group("expert_data_parallel", parameter.group_name)  # type: ignore[attr-defined]
        return cls(name, (experts[1], *shape[1:]), experts, _replica(group))

    def fragment(self, kind: str, start: int, data: Tensor, local_shape: tuple[int, ...], replicated: bool) -> Fragment:
        """Makes the fragment of ``data``, from element ``start`` of a local tensor of shape ``local_shape``.

        The local tensor is the weight, a moment, or a factor of a moment (Adafactor's rows and columns).
        """
        shape = local_shape
        if self.experts is not None:
            first, count = self.experts
            start += first * math.prod(local_shape[1:])
            shape = (count, *local_shape[1:])
        return Fragment(self.name, kind, start, data, shape, self.replica if replicated else (0, 1))


def _replica(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's index in the group and the group's size; ``Fragment.replica``."""
    if not dist.is_initialized():
        return (0, 1)
    return (dist.get_rank(group), dist.get_world_size(group))


def _frozen(location: _Location, parameter: nn.Parameter) -> Iterator[Fragment]:
    if not is_partitioned(parameter):
        yield location.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)
    elif len(own := partition(parameter)) > 0:
        yield location.fragment(WEIGHT, partition_start(parameter), own, location.shape, replicated=False)


def _unpartitioned(location: _Location, parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[Fragment]:
    yield location.fragment(WEIGHT, 0, parameter.detach().view(-1), tuple(parameter.shape), replicated=True)
    for kind, value in state.items():  # the step counter has no dimension; ``Engine.counters`` saves it
        if torch.is_tensor(value) and value.dim() > 0:
            yield location.fragment(kind, 0, value.view(-1), tuple(value.shape), replicated=True)


def _partitioned(
    location: _Location, parameter: nn.Parameter, piece: Piece, state: dict[str, Any]
) -> Iterator[Fragment]:
    for kind, value in {WEIGHT: piece.flat.detach(), **state}.items():
        if torch.is_tensor(value) and value.shape == piece.flat.shape:  # the step counter has another
            own = value[piece.place : piece.place + piece.numel]
            yield location.fragment(kind, piece.start, own, full_shape(parameter), replicated=False)
