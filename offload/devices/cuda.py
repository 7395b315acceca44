"""A CUDA card as the device. All calls of CUDA in this package are in this file."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, cuda

from offload.devices.device import Buffer, Device, DeviceOutOfMemory, Memory, PeakCounter, Peaks, Rates

_PROBE_BYTES = 32 * 2**20
_HOST_REGISTER_PORTABLE = 1
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class CudaDevice(Device):
    """A card with a byte budget for all of this process's memory on it.

    Buffers are storages of PyTorch's allocator on the computation's stream. The allocator need not know of copies on
    other streams: an upload waits for the computation's stream first, and the computation's stream waits for all copies
    before a buffer is released. There are only two streams for copies, because each new stream gets its own memory
    pool.

    Args:
        budget_bytes: None: 95 % of the memory free on the card or reserved by PyTorch. The other 5 % are for memory
            unusable by the allocator, such as gaps between blocks.
        torch_device: the card; None: the current one.
    """

    _largest_peaks: ClassVar[dict[torch.device, int]] = {}  # of allocators, before their own statistic began anew

    def __init__(self, budget_bytes: int | None = None, torch_device: torch.device | None = None) -> None:
        self.torch_device = torch_device or torch.device("cuda", cuda.current_device())
        if budget_bytes is None:
            free = cuda.mem_get_info(self.torch_device)[0]
            budget_bytes = int(0.95 * (free + cuda.memory_reserved(self.torch_device)))
        super().__init__(budget_bytes)
        self._uploads, self._downloads = cuda.Stream(self.torch_device), cuda.Stream(self.torch_device)
        self._buffer_bytes = 0  # as the allocator counts them, rounded up to its blocks
        self._peaks = PeakCounter()
        self._take_peak()

    # Memory

    @property
    def nonmodel_bytes(self) -> int:
        """The bytes of everything but buffers now."""
        return cuda.memory_allocated(self.torch_device) - self._buffer_bytes

    def acquire(self, buffer: Buffer) -> None:
        """Gives the buffer memory of PyTorch's allocator; see ``Device``."""
        if buffer.present:
            raise RuntimeError("the buffer is present already")
        others = self.nonmodel_bytes
        if self.used_bytes + others + buffer.num_bytes > self.budget_bytes:
            raise DeviceOutOfMemory(
                f"{buffer.num_bytes} bytes more than {self.used_bytes} of buffers and {others} of non-model memory "
                f"exceed the budget of {self.budget_bytes}"
            )
        self._resize(buffer, buffer.num_bytes)
        buffer.present = True

    def release(self, buffer: Buffer) -> None:
        """Takes the memory back; see ``Device``."""
        if not buffer.present:
            raise RuntimeError("the buffer was released before")
        self._resize(buffer, 0)
        buffer.present = False

    def _resize(self, buffer: Buffer, num_bytes: int) -> None:
        # Peaks of the allocator include buffers, so they are read before each change of the buffers.
        self._note_peak()
        before = cuda.memory_allocated(self.torch_device)
        buffer.storage.resize_(num_bytes)
        self._buffer_bytes += cuda.memory_allocated(self.torch_device) - before
        self.used_bytes += num_bytes or -buffer.num_bytes
        cuda.reset_peak_memory_stats(self.torch_device)

    def _note_peak(self) -> None:
        self._peaks.note(self._take_peak() - self._buffer_bytes, self.used_bytes)

    def _take_peak(self) -> int:
        """Returns the allocator's peak since the last call."""
        peak = cuda.max_memory_allocated(self.torch_device)
        cuda.reset_peak_memory_stats(self.torch_device)
        self._largest_peaks[self.torch_device] = max(peak, self._largest_peaks.get(self.torch_device, 0))
        return peak

    @classmethod
    def largest_peak(cls, torch_device: torch.device) -> int:
        """The peak of PyTorch's allocator on a card in this process. Its own statistic is reset at every moment."""
        return max(cuda.max_memory_allocated(torch_device), cls._largest_peaks.get(torch_device, 0))

    def begin_moment(self, number: int) -> Peaks:
        """Starts a moment; see ``Device``."""
        self._note_peak()
        return self._peaks.take()

    def _pin(self, memory: Tensor) -> str | None:
        code = cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _HOST_REGISTER_PORTABLE)
        if int(code) == 0:
            return None
        if int(code) == _ALREADY_REGISTERED:
            raise RuntimeError("host memory was freed while it was pinned: CUDA would copy from and to its old pages")
        # CUDA reports the failure again at the next launch of a kernel. Launch one here, where the error is expected.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)
        return f"cudaHostRegister returned {code}"

    def _unpin(self, memory: Tensor) -> None:
        cuda.synchronize(self.torch_device)  # a copy may still read or write it
        code = cuda.cudart().cudaHostUnregister(memory.data_ptr())
        if int(code) != 0:
            raise RuntimeError(f"cudaHostUnregister returned {code}")

    @functools.cached_property
    def rates(self) -> Rates:  # type: ignore[override]
        """The best of three copies of 32 MiB in each direction and from pageable memory, measured at first use."""
        there = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=self.torch_device)
        pageable = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        try:
            pinned = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:  # the limit of pinned memory is reached
            pinned = pageable
        up, down, slow = (self._rate(*ends) for ends in ((there, pinned), (pinned, there), (there, pageable)))
        return Rates(upload=up, download=down, pageable=slow)

    def _rate(self, target: Tensor, source: Tensor) -> float:
        seconds = []
        for _ in range(4):  # the first copy only warms up
            cuda.synchronize(self.torch_device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            cuda.synchronize(self.torch_device)
            seconds.append(time.perf_counter() - begin)
        return source.nbytes / min(seconds[1:])

    # Copies

    def upload(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[cuda.Event]) -> cuda.Event:
        """Queues a copy to the device."""
        self.uploaded_bytes += source.nbytes
        if self.pageable_bytes:  # CUDA may read pageable memory at the call, before the copy's turn in the queue
            for event in after:
                event.synchronize()
        return self._copy(self._uploads, source, target, after)

    def download(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[cuda.Event]) -> cuda.Event:
        """Queues a copy to the host."""
        self.downloaded_bytes += source.nbytes
        return self._copy(self._downloads, source, target, after)

    def _copy(self, stream: cuda.Stream, source: Tensor, target: Tensor, after: Sequence[cuda.Event]) -> cuda.Event:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(f"a copy changes nothing: {source.shape} {source.dtype} to {target.shape} {target.dtype}")
        for event in after:
            stream.wait_event(event)
        with cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    # Order. Jobs order the threads of the host by waiting for each other, so host_event has nothing to record.

    def compute_event(self) -> cuda.Event:
        """Records an event of the computation's stream."""
        return cuda.current_stream(self.torch_device).record_event()

    def compute_waits(self, event: cuda.Event) -> None:
        """Makes the computation's stream wait for an event."""
        cuda.current_stream(self.torch_device).wait_event(event)

    def host_event(self) -> None:
        """Returns nothing: jobs order the host's threads, see ``HostWorkers``."""
        return None

    def host_waits(self, event: cuda.Event | None) -> None:
        """Waits for an event of a stream."""
        if event is not None:
            event.synchronize()

    def mark(self) -> cuda.Event:
        """Records an event of the computation's stream."""
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self.torch_device))
        return event

    def seconds_between(self, begin: cuda.Event, end: cuda.Event) -> float:
        """Returns the time between two marks, and waits for the second."""
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def computes_on(self, memory: Memory, write: bool) -> None:
        """Does nothing: the computation's stream runs its work in order."""

    def host_accesses(self, memory: Tensor, write: bool) -> None:
        """Does nothing: only the simulated device checks for races."""
