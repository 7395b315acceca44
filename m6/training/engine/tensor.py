"""The engine of ``m6.parallel.tensor``: matrices that are divided over ranks, inside of DeepSpeed's ZeRO."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from m6.architecture.sharing import Sharing
from m6.checkpoints.fragment import Fragment
from m6.config.run import RunConfig
from m6.model.tensor.placement import Shard
from m6.training.engine.engine import Engine
from m6.training.mesh import Mesh
from m6.training.offloading.experts import OffloadedExperts

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_Key = tuple[str, str]
"""Name and kind of a tensor, see ``Fragment``."""


class TensorEngine(Engine):
    """The ranks of a tensor group compute the same hidden states from their parts of matrices.

    Gradients of whole parameters are then equal on all of them, and those of parts need no sum but that over
    micro-batches.

    A fragment is a flat range of a whole matrix, and a part of a matrix is many ranges. So ``fragments`` puts divided
    matrices together, and yields a range of them to each rank of the run. ``publish_weights`` takes the parts back.
    """

    def __init__(
        self,
        deepspeed: DeepSpeedEngine,
        config: RunConfig,
        mesh: Mesh,
        offloaded: OffloadedExperts | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(deepspeed, config, mesh, offloaded, sharing)
        self._expert_group = mesh.model  # whose ranks have other parts of the gradient, see ``clip_gradients``
        self._shards: dict[str, Shard] = {
            name: parameter.shard for name, parameter in self.module.named_parameters() if hasattr(parameter, "shard")
        }
        self._lent: dict[_Key, Fragment] = {}

    def begin_step(self, learning_rate: float, shares: tuple[int, ...] | None = None) -> None:
        """See ``Engine.begin_step``."""
        self._lent.clear()  # a checkpoint has been written
        super().begin_step(learning_rate, shares)

    def fragments(self, to_fill: bool = False) -> Iterator[Fragment]:
        """See ``Engine.fragments``; all ranks call it together."""
        self._lent.clear()
        parts: dict[_Key, list[Fragment]] = {}
        dims = self._mesh.dims
        for fragment in super().fragments(to_fill):
            if fragment.name in self._shards:
                parts.setdefault((fragment.name, fragment.kind), []).append(fragment)
            else:
                index, count = fragment.replica
                shared = (index * dims.tp + dims.tp_rank, count * dims.tp)
                yield replace(fragment, replica=shared)
        for key in self._keys(parts):
            whole = self._whole(key, parts.get(key, []))
            begin, end = self._mesh.dims.share(whole.numel())
            self._lent[key] = Fragment(*key, begin, whole.view(-1)[begin:end].clone(), tuple(whole.shape))
            yield self._lent[key]

    def publish_weights(self) -> None:
        """See ``Engine.publish_weights``; all ranks call it together."""
        lent, self._lent = self._lent, {}
        live: dict[_Key, list[Fragment]] = {}
        for fragment in super().fragments():
            live.setdefault((fragment.name, fragment.kind), []).append(fragment)
        for key, fragment in lent.items():
            whole = torch.zeros(fragment.shape, dtype=fragment.data.dtype, device=fragment.data.device)
            whole.view(-1)[fragment.offset : fragment.end] = fragment.data
            dist.all_reduce(whole)
            part = self._shards[fragment.name].of(whole).reshape(-1)
            for target in live.get(key, []):
                target.data.copy_(part[target.offset : target.end])
        super().publish_weights()

    def _keys(self, parts: dict[_Key, list[Fragment]]) -> list[_Key]:
        """The divided tensors of all ranks, in one order: ZeRO may leave a rank nothing of a small one."""
        found: list[list[_Key]] = [[] for _ in range(self._mesh.dims.world_size)]
        dist.all_gather_object(found, list(parts))
        return sorted({key for keys in found for key in keys})

    def _whole(self, key: _Key, fragments: list[Fragment]) -> Tensor:
        """A whole tensor, from the fragments of its parts that this rank and all others hold."""
        shard = self._shards[key[0]]
        whole = torch.zeros(shard.shape, device=self._device)
        place = shard.of(whole)
        part = torch.zeros(math.prod(place.shape), device=self._device)
        for fragment in fragments:
            if fragment.replica[0] == 0:  # each element comes from one rank
                part[fragment.offset : fragment.end] = fragment.data
        place.copy_(part.view_as(place))
        dist.all_reduce(whole)
        return whole
