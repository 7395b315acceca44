"""The interface of an accelerator: memory under a byte budget, two queues of copies, and events to order them."""

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
"""A point in the work of a queue; each kind of device has its own type."""


@dataclass(frozen=True)
class Rates:
    """The rates of copies in bytes per second; plans and predictions of times use them.

    Attributes:
        upload, download: to and from the device, with pinned host memory.
        pageable: either direction, with host memory that the system refused to pin.
    """

    upload: float = 12e9
    download: float = 12e9
    pageable: float = 3e9


@dataclass(frozen=True)
class Peaks:
    """The peaks of memory since the last moment began, in bytes.

    Attributes:
        nonmodel: of everything but buffers.
        total: of buffers and everything else together.
    """

    nonmodel: int
    total: int


class DeviceOutOfMemory(RuntimeError):
    """The byte budget is too small for a request."""


class Buffer:
    """A piece of device memory of fixed size, to be released and acquired again.

    All views of it share one storage object, also after a release. Autograd may thus save a view in the forward pass;
    in the backward pass, the view shows the data after its second upload.

    Attributes:
        num_bytes: the size while it is present.
        present: whether it occupies memory now.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.present = False
        self.device = device
        self.storage = torch.UntypedStorage(0, device=device)

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor:
        """Returns a new tensor over part of the memory, with its own version counter.

        Autograd refuses a saved tensor if its version counter has changed. An upload only writes the same data again,
        so it must not count as a change: each view has its own counter, untouched by uploads.

        Raises:
            RuntimeError: the buffer is not present.
            ValueError: the tensor does not fit.
        """
        if not self.present:
            raise RuntimeError("a buffer that is not present has no memory to view")
        if offset_bytes + math.prod(shape) * dtype.itemsize > self.num_bytes:
            raise ValueError(f"{list(shape)} of {dtype} at byte {offset_bytes} exceeds {self.num_bytes} bytes")
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        return tensor.set_(self.storage, offset_bytes // dtype.itemsize, tuple(shape))  # type: ignore[call-overload]


Memory = Buffer | Tensor
"""Device memory of a copy: a buffer, or a tensor. The owner keeps the tensor until the computation has waited."""


class PeakCounter:
    """Records the peaks of a moment. Call ``note`` before and after each change of the buffers' bytes."""

    def __init__(self) -> None:
        self._nonmodel = self._total = 0

    def note(self, nonmodel_bytes: int, used_bytes: int) -> None:
        """Updates the peaks.

        Args:
            nonmodel_bytes: the peak of the non-model memory since the last call.
            used_bytes: the bytes of buffers since the last call.
        """
        self._nonmodel = max(self._nonmodel, nonmodel_bytes)
        self._total = max(self._total, nonmodel_bytes + used_bytes)

    def take(self) -> Peaks:
        """Returns the peaks and starts the next moment."""
        peaks = Peaks(self._nonmodel, self._total)
        self._nonmodel = self._total = 0
        return peaks


class Device(ABC):
    """An accelerator with a byte budget for buffers and all other memory of the process on it.

    Work is ordered as on CUDA. Computation, uploads and downloads are three queues, and only events order one queue
    behind another. ``acquire`` and ``release`` are part of the computation's queue. So an upload has to wait for
    earlier computation on the same memory, and the computation has to wait for all copies before a release.

    Attributes:
        torch_device: where the tensors are.
        budget_bytes: the limit for buffers and non-model memory together.
        used_bytes: the bytes of the present buffers.
        pinned_bytes, pageable_bytes: how much host memory for copies could be pinned, and how much could not.
        rates: how fast copies are.
        uploaded_bytes, downloaded_bytes: the bytes of all copies so far.
        storages: ``_cdata`` of the buffers' storages.
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
        """Makes a buffer without memory: ``acquire`` it before use."""
        buffer = Buffer(num_bytes, self.torch_device)
        self.storages.add(buffer.storage._cdata)
        return buffer

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor [numel] with undefined content. It counts as non-model memory."""
        return torch.empty(numel, dtype=dtype, device=self.torch_device)

    @abstractmethod
    def acquire(self, buffer: Buffer) -> None:
        """Gives the buffer memory with undefined content.

        Raises:
            DeviceOutOfMemory: the budget would be exceeded.
        """

    @abstractmethod
    def release(self, buffer: Buffer) -> None:
        """Takes the memory back. The computation must have waited for all copies from and to it."""

    @abstractmethod
    def upload(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[Event]) -> Event:
        """Queues a copy from host memory to ``target``, a view of ``memory``, and returns its end.

        The copy starts behind the events ``after``.
        """

    @abstractmethod
    def download(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[Event]) -> Event:
        """Queues a copy from ``source``, a view of ``memory``, to host memory, and returns its end.

        The copy starts behind the events ``after``.
        """

    @abstractmethod
    def compute_event(self) -> Event:
        """Returns the end of all computation queued so far."""

    @abstractmethod
    def compute_waits(self, event: Event) -> None:
        """Makes later computation wait for ``event``; the calling thread does not wait."""

    @abstractmethod
    def host_event(self) -> Event:
        """Returns an event after all work of the calling thread so far."""

    @abstractmethod
    def host_waits(self, event: Event) -> None:
        """Makes the calling thread wait for ``event``."""

    @property
    @abstractmethod
    def nonmodel_bytes(self) -> int:
        """The bytes of everything but buffers now."""

    @abstractmethod
    def begin_moment(self, number: int) -> Peaks:
        """Starts moment ``number`` of the step and returns the peaks since the last call."""

    @abstractmethod
    def mark(self) -> Event:
        """Returns a timed event in the computation, see ``seconds_between``."""

    @abstractmethod
    def seconds_between(self, begin: Event, end: Event) -> float:
        """Returns the seconds from one mark to a later one; waits until the computation has passed both."""

    @abstractmethod
    def _pin(self, memory: Tensor) -> str | None:
        """Pins a block; returns None, or the reason if the system refuses.

        Raises:
            RuntimeError: the system takes the memory for pinned already.
        """

    @abstractmethod
    def _unpin(self, memory: Tensor) -> None:
        """Undoes a successful ``_pin``."""

    def pin(self, memory: Tensor) -> bool:
        """Pins a block of host memory, so copies do not make the host wait; returns whether it is pinned.

        If the system refuses, the block stays pageable: copies are slower, and results are the same. The first refusal
        is a warning with the cost.
        """
        refusal = self._pin(memory)
        if refusal is None:
            self.pinned_bytes += memory.nbytes
            return True
        if not self.pageable_bytes:
            warnings.warn(
                f"{memory.nbytes:,} bytes of host memory could not be pinned ({refusal}); {self.pinned_bytes:,} bytes "
                f"are. Copies of memory that is not pinned run at about {self.rates.pageable / 1e9:.1f} instead of "
                f"{self.rates.upload / 1e9:.1f} GB/s and make the host wait: raise the limit of locked memory (ulimit "
                "-l) or keep less on the host",
                stacklevel=2,
            )
        self.pageable_bytes += memory.nbytes
        return False

    def unpin(self, memory: Tensor, pinned: bool) -> None:
        """Undoes ``pin``, given its result as ``pinned``. Call it before the block is freed."""
        if pinned:
            self._unpin(memory)
            self.pinned_bytes -= memory.nbytes
        else:
            self.pageable_bytes -= memory.nbytes

    @abstractmethod
    def computes_on(self, memory: Memory, write: bool) -> None:
        """Declares an access of the next queued computation: it reads ``memory``, or writes to it if ``write``."""

    @abstractmethod
    def host_accesses(self, memory: Tensor, write: bool) -> None:
        """Declares an access of the calling thread: it reads this host memory, or writes to it if ``write``."""
