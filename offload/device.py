"""What the runtime asks of an accelerator: memory under a byte budget, two copy queues, and events between them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Event = Any
"""A point in the work of a queue; every device has its own kind."""


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


class Device(ABC):
    """An accelerator with a byte budget for everything: buffers, and what the rest of the model holds.

    Work is ordered as on CUDA: computation, uploads and downloads are three queues that know nothing of each other
    but through events. Memory belongs to the computation's queue: ``acquire`` and ``release`` take their place in it,
    so an upload has to wait for the computation that used the memory before, and a release for the copies.

    Attributes:
        torch_device: where the tensors live.
        budget_bytes: what buffers and non-model memory may occupy together.
        used_bytes: what the present buffers occupy.
        uploaded_bytes, downloaded_bytes: moved since the construction.
    """

    torch_device: torch.device

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.uploaded_bytes = 0
        self.downloaded_bytes = 0

    def buffer(self, num_bytes: int) -> Buffer:
        return Buffer(num_bytes, self.torch_device)

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
    def upload(self, source: Tensor, target: Tensor, buffer: Buffer, after: Sequence[Event]) -> Event:
        """Queues a copy from host memory to ``target``, a view of ``buffer``, behind the events ``after``."""

    @abstractmethod
    def download(self, source: Tensor, target: Tensor, buffer: Buffer, after: Sequence[Event]) -> Event:
        """Queues a copy from ``source``, a view of ``buffer``, to host memory behind the events ``after``."""

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

    @abstractmethod
    def begin_moment(self, number: int) -> int:
        """Tells that the step's access ``number`` begins; returns the peak of non-model bytes since the last call."""

    @abstractmethod
    def pin(self, memory: Tensor) -> None:
        """Makes a block of host memory fit for copies that do not hold up the host."""

    @abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undoes ``pin``, before the block is freed."""

    @abstractmethod
    def computes_on(self, buffer: Buffer, write: bool) -> None:
        """Declares that the computation queued next reads ``buffer``, or writes it too."""

    @abstractmethod
    def host_accesses(self, memory: Tensor, write: bool) -> None:
        """Declares that the calling thread reads this host memory now, or writes it too."""
