"""Measures what autograd keeps for the backward pass: the truth that ``m6.planning.memory`` predicts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SavedTensors:
    """Counts, inside ``with``, the bytes of the storages that autograd saves; works on the meta device, too.

    A storage counts once however many tensors view it, and those of ``module``'s parameters and buffers do not
    count. Activation checkpointing counts with what it keeps, not with what it computes anew.

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
            self._kept.append(tensor)  # or a later storage could get the same address
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor

    def __enter__(self) -> SavedTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        self._kept.clear()


def storage_bytes(*tensors: Tensor) -> int:
    """The bytes of the storages behind ``tensors``, each counted once."""
    return sum({_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # unlike data_ptr also told apart on the meta device


def _identity(tensor: Tensor) -> Tensor:
    return tensor
