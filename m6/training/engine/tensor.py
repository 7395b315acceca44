"""Sharded matrices of tensor parallelism in checkpoints, as fragments of whole matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from m6.checkpoints.format import Fragment
from m6.model.placements import Shard
from m6.training.deepspeed_private import is_divided
from m6.training.mesh import Mesh

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
