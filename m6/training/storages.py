"""Counts the bytes of tensor storages, each storage once. :mod:`m6.planning.cost.memory` predicts these bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from offload import StorageMeter


class SavedTensors:
    """Counts the bytes of the storages saved by autograd inside ``with``. It works on the meta device, too.

    Parameters and buffers of ``module`` do not count. A checkpointed block counts with its inputs only, not with
    recomputed tensors.

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
        return tensor.detach()  # without it a node with its own output saved would form a reference cycle

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._kept.clear()


def new_storages(*existing: Tensor) -> StorageMeter:
    """A meter of the storages made by operators inside ``with``, without the storages of ``existing``."""
    from offload import StorageMeter

    return StorageMeter((), {_key(tensor) for tensor in existing})


def storage_bytes(*tensors: Tensor) -> int:
    """The bytes of the storages of ``tensors``. A storage of several tensors counts once."""
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # data_ptr is 0 on the meta device


def _identity(tensor: Tensor) -> Tensor:
    return tensor
