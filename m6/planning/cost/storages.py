"""Counts the bytes of tensor storages, each storage once: what :mod:`m6.planning.cost.memory` predicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from offload import StorageMeter


class SavedTensors:
    """Counts the bytes of the storages that autograd saves inside ``with``; works on the meta device, too.

    Parameters and buffers of ``module`` do not count. Of a checkpointed block only its inputs count, not what the
    backward pass recomputes.

    Attributes:
        bytes: the sum so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.bytes = 0
        self._seen = {_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._kept: list[Tensor] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _identity)

    def _pack(self, tensor: Tensor) -> Tensor:
        if _key(tensor) not in self._seen:
            self._seen.add(_key(tensor))
            self._kept.append(tensor)  # otherwise a later storage could reuse the address
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor.detach()  # a node that saves its own output would form a reference cycle

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._kept.clear()


def new_storages(*existing: Tensor) -> StorageMeter:
    """A meter of the storages that operators make inside ``with``; those of ``existing`` do not count."""
    return StorageMeter((), {_key(tensor) for tensor in existing})


def storage_bytes(*tensors: Tensor) -> int:
    """The bytes of the storages of ``tensors``; a storage that several tensors share counts once."""
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def engine_state_bytes(engine: Any) -> dict[str, int]:
    """What a DeepSpeed engine holds on this rank between two steps: ``weights`` (with buffers) and
    ``optimizer_state`` (with fp32 masters, where weights have them)."""
    return {name: storage_bytes(*tensors) for name, tensors in engine_state(engine).items()}


def engine_state(engine: Any) -> dict[str, list[Tensor]]:
    """The tensors behind ``engine_state_bytes``."""
    stage, parameters = engine.zero_optimization_stage(), list(engine.module.parameters())
    weights = [parameter.data for parameter in parameters] + list(engine.module.buffers())
    optimizer, masters = engine.optimizer, []
    if stage == 3:
        weights += [parameter.ds_tensor for parameter in parameters]
        masters = optimizer.fp32_partitioned_groups_flat
    elif stage > 0:
        masters = optimizer.single_partition_of_fp32_groups
    state = (optimizer if stage == 0 else optimizer.optimizer).state
    moments = [value for entry in state.values() for value in entry.values() if isinstance(value, Tensor)]
    return {"weights": weights, "optimizer_state": [*moments, *masters]}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # data_ptr is 0 on the meta device


def _identity(tensor: Tensor) -> Tensor:
    return tensor
