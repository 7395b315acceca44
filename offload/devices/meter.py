"""Counts non-model memory where no allocator does: on the CPU, and for fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(Protocol):
    """Counts bytes of memory."""

    @property
    def total(self) -> int:
        """The bytes in use now."""

    def take_peak(self) -> int:
        """Returns the most bytes in use since the last call."""


class StorageMeter(TorchDispatchMode):
    """Counts the storages made by operators inside ``with``, until they are freed, inside or outside of it.

    It does not see temporary memory inside an operator.

    Args:
        existing: tensors made earlier, to be counted too.
        ignored: ``_cdata`` of storages to leave out. The set may change at any time.
    """

    def __init__(self, existing: Iterable[Tensor], ignored: set[int]) -> None:
        super().__init__()
        self.total = 0
        self._ignored = ignored
        self._bytes: dict[int, int] = {}
        for tensor in existing:
            self._add(tensor)
        self._peak = self.total

    def take_peak(self) -> int:
        """Returns the most bytes in use since the last call."""
        peak, self._peak = max(self._peak, self.total), self.total
        return peak

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type != "meta":
                self._add(tensor)
        self._peak = max(self._peak, self.total)
        return output

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._bytes or key in self._ignored:
            return
        self._bytes[key] = storage.nbytes()
        self.total += storage.nbytes()
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.total -= self._bytes.pop(key)
