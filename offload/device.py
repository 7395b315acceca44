"""What the runtime asks of an accelerator: memory under a byte budget, two copy queues, and events between them."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Event = Any
"""A point in the work of a queue; every device has its own kind."""


@dataclass(frozen=True)
class Rates:
    """Bytes per second. They weigh a byte up against a byte down, and predict how long copies take.

    Attributes:
        pageable: of copies from and to host memory that could not be pinned.
    """

    upload: float = 12e9
    download: float = 12e9
    pageable: float = 3e9


@dataclass(frozen=True)
class Peaks:
    """The most bytes since the last moment began: of everything but buffers, and of all together."""

    nonmodel: int
    total: int


class DeviceOutOfMemory(RuntimeError):
    """The byte budget does not hold what was asked for."""


class Buffer:
    """Device memory of a fixed size that comes and goes.

    All tensors that ever view it share one storage. So a view that autograd saved in the forward pass shows the data
    that was fetched again for the backward pass, though the memory served others in between.

    Attributes:
        num_bytes: its size while it is present.
        present: whether it occupies memory now.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.present = False
        self.device = device
        self.storage = torch.UntypedStorage(0, device=device)

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor:
        """A new tensor over part of the memory, with a version counter of its own.

        Autograd compares version counters to find saved tensors that were written to; a fetch writes what was there.
        """
        if not self.present:
            raise RuntimeError("a buffer that is not present has no memory to view")
        if offset_bytes + math.prod(shape) * dtype.itemsize > self.num_bytes:
            raise ValueError(f"{list(shape)} of {dtype} at byte {offset_bytes} exceeds {self.num_bytes} bytes")
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        return tensor.set_(self.storage, offset_bytes // dtype.itemsize, tuple(shape))  # type: ignore[call-overload]


Memory = Buffer | Tensor
"""Where copies and computation meet: a buffer, or a tensor of PyTorch's own, which whoever copies keeps until the
computation has waited for the copy."""


class PeakCounter:
    """Follows the peaks of a moment. To be told before and after every change of what buffers occupy."""

    def __init__(self) -> None:
        self._nonmodel = self._total = 0

    def note(self, nonmodel_bytes: int, used_bytes: int) -> None:
        """``nonmodel_bytes``: their peak since the last call; ``used_bytes`` did not change since then."""
        self._nonmodel = max(self._nonmodel, nonmodel_bytes)
        self._total = max(self._total, nonmodel_bytes + used_bytes)

    def take(self) -> Peaks:
        peaks = Peaks(self._nonmodel, self._total)
        self._nonmodel = self._total = 0
        return peaks


class Device(ABC):
    """An accelerator with a byte budget for everything: buffers, and what the rest of the model holds.

    Work is ordered as on CUDA: computation, uploads and downloads are three queues that know nothing of each other
    but through events. Memory belongs to the computation's queue: ``acquire`` and ``release`` take their place in it,
    so an upload has to wait for the computation that used the memory before, and a release for the copies.

    Attributes:
        torch_device: where the tensors live.
        budget_bytes: what buffers and non-model memory may occupy together.
        used_bytes: what the present buffers occupy.
        pinned_bytes, pageable_bytes: host memory that is in use for copies, and whether it could be pinned.
        rates: how fast copies are.
        uploaded_bytes, downloaded_bytes: moved since the construction.
        storages: ``_cdata`` of the storages behind buffers.
    """

    torch_device: torch.device
    rates: Rates

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self.uploaded_bytes = 0
        self.downloaded_bytes = 0
        self.storages: set[int] = set()

    def buffer(self, num_bytes: int) -> Buffer:
        buffer = Buffer(num_bytes, self.torch_device)
        self.storages.add(buffer.storage._cdata)
        return buffer

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] of PyTorch's own memory, which counts as non-model memory; its content is undefined."""
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    @abstractmethod
    def acquire(self, buffer: Buffer) -> None:
        """Gives the buffer memory, whose content is undefined.

        Raises:
            DeviceOutOfMemory: the budget would be exceeded.
        """

    @abstractmethod
    def release(self, buffer: Buffer) -> None:
        """Takes the memory back; the computation has waited for all copies from and to it."""

    @abstractmethod
    def upload(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[Event]) -> Event:
        """Queues a copy from host memory to ``target``, a view of ``memory``, behind the events ``after``."""

    @abstractmethod
    def download(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[Event]) -> Event:
        """Queues a copy from ``source``, a view of ``memory``, to host memory behind the events ``after``."""

    @abstractmethod
    def compute_event(self) -> Event:
        """The point behind all computation that was queued so far."""

    @abstractmethod
    def compute_waits(self, event: Event) -> None:
        """Later computation starts behind ``event``; the calling thread does not wait."""

    @abstractmethod
    def host_event(self) -> Event:
        """The point behind everything that the calling thread did."""

    @abstractmethod
    def host_waits(self, event: Event) -> None:
        """The calling thread waits for ``event``."""

    @property
    @abstractmethod
    def nonmodel_bytes(self) -> int:
        """What everything but buffers occupies now."""

    @abstractmethod
    def begin_moment(self, number: int) -> Peaks:
        """Tells that the step's access ``number`` begins; returns the peaks since the last call."""

    @abstractmethod
    def mark(self) -> Event:
        """A point in the computation whose time can be read later."""

    @abstractmethod
    def seconds_between(self, begin: Event, end: Event) -> float:
        """From one mark to a later one; waits until the computation has passed both."""

    @abstractmethod
    def _pin(self, memory: Tensor) -> str | None:
        """Pins a block; the reason where that is refused."""

    @abstractmethod
    def _unpin(self, memory: Tensor) -> None:
        """Undoes ``_pin`` where that was granted."""

    def pin(self, memory: Tensor) -> bool:
        """Makes a block of host memory fit for copies that do not hold up the host; returns whether it is.

        Where the system refuses, the block stays pageable: slower, and no less right. The first time that is a
        warning with its cost.
        """
        refusal = self._pin(memory)
        if refusal is None:
            self.pinned_bytes += memory.nbytes
            return True
        if not self.pageable_bytes:
            warnings.warn(
                f"{memory.nbytes:,} bytes of host memory could not be pinned ({refusal}); {self.pinned_bytes:,} bytes "
                f"are. Copies of what is not pinned run at about {self.rates.pageable / 1e9:.1f} instead of "
                f"{self.rates.upload / 1e9:.1f} GB/s and hold up the host: raise the limit of locked memory (ulimit "
                "-l) or lower what the host holds",
                stacklevel=2,
            )
        self.pageable_bytes += memory.nbytes
        return False

    def unpin(self, memory: Tensor, pinned: bool) -> None:
        """Undoes ``pin``, which returned ``pinned``, before the block is freed."""
        if pinned:
            self._unpin(memory)
            self.pinned_bytes -= memory.nbytes
        else:
            self.pageable_bytes -= memory.nbytes

    @abstractmethod
    def computes_on(self, memory: Memory, write: bool) -> None:
        """Declares that the computation queued next reads ``memory``, or writes it too."""

    @abstractmethod
    def host_accesses(self, memory: Tensor, write: bool) -> None:
        """Declares that the calling thread reads this host memory now, or writes it too."""
