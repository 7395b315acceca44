"""A device in host memory for tests and runs on CPUs. It finds late copies, stale memory and races.

Vector clocks (Mattern 1989) of queues and threads find unordered accesses to memory.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.devices.device import Buffer, Device, DeviceOutOfMemory, Memory, PeakCounter, Peaks, Rates
from offload.devices.meter import Meter

Clock = dict[str, int]


class SimulatedRace(RuntimeError):
    """Two unordered accesses to the same memory, one of them a write."""


@dataclass
class _Accesses:
    """The last write to a piece of memory and the reads since then, each as queue -> its clock at that time."""

    writes: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)


class VectorClocks:
    """A vector clock and a simulated time for each queue and each thread, and the accesses to memory.

    The clocks have to order each access behind earlier conflicting ones. So races are found whatever the timing of a
    run was. The caller holds a lock.

    Attributes:
        clocks: name of a queue or thread -> its clock.
        times: name of a queue or thread -> its time in seconds.
    """

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {}
        self.times: dict[str, float] = {}
        self._accesses: dict[int, _Accesses] = {}
        self._main = threading.get_ident()

    def thread(self) -> str:
        """Advances the calling thread's clock and returns the thread's name."""
        ident = threading.get_ident()
        name = "main" if ident == self._main else f"thread {ident}"
        self._tick(name)
        return name

    def enqueue(self, queue: str) -> None:
        """Adds work to a queue, ordered behind all earlier work of the calling thread."""
        thread = self.thread()
        self._tick(queue)
        self.join(queue, self.clocks[thread], self.times[thread])

    def join(self, name: str, clock: Clock, time_s: float) -> None:
        """Orders a queue or thread behind an event."""
        own = self.clocks[name]
        for other, count in clock.items():
            own[other] = max(own.get(other, 0), count)
        self.times[name] = max(self.times[name], time_s)

    def key(self, memory: Memory) -> int:
        """Returns the key of a piece of device memory. The accesses to a tensor are forgotten with its storage."""
        if isinstance(memory, Buffer):
            return id(memory)
        return self._key_of_tensor(memory)

    def access(self, name: str, memory: int, write: bool) -> None:
        """Records an access by a queue or thread to the memory with this key.

        Raises:
            SimulatedRace: nothing orders it behind an earlier write, or behind an earlier read if it is a write.
        """
        clock, accesses = self.clocks[name], self._accesses.setdefault(memory, _Accesses())
        earlier = [("write", accesses.writes)] + ([("read", accesses.reads)] if write else [])
        for kind, log in earlier:
            for other, count in log.items():
                if clock.get(other, 0) < count:
                    raise SimulatedRace(
                        f"{name} {'writes' if write else 'reads'} memory without waiting for a {kind} by {other}"
                    )
        if write:
            accesses.writes, accesses.reads = {name: clock[name]}, {}
        else:
            accesses.reads[name] = clock[name]

    def _tick(self, name: str) -> None:
        clock = self.clocks.setdefault(name, {})
        clock[name] = clock.get(name, 0) + 1
        self.times.setdefault(name, 0.0)

    def _key_of_tensor(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._accesses:
            weakref.finalize(storage, self._accesses.pop, key, None)
        return key


_POISON = 0xFF  # all ones is a NaN in every floating-point type


@dataclass
class _Copy:
    """A queued copy, and the copies to run before it."""

    run: Callable[[], object]
    requires: list[_Copy]
    done: bool = False


@dataclass(frozen=True)
class SimulatedEvent:
    """A point in the work of a queue or thread: its clock, its time, and the copy to run before it."""

    clock: Clock
    time_s: float
    copy: _Copy | None = None


class SimulatedDevice(Device):
    """Computes on the CPU, and fails where an accelerator could give wrong results.

    * Buffers and non-model memory together have to fit the budget at every moment.
    * A copy runs when something waits for it, or at a random earlier time. Code without the wait reads old data.
    * Memory is filled with NaN when it is acquired and when it is released.
    * Each queue and thread has a vector clock. An access raises ``SimulatedRace`` if the clocks do not order it behind
      an earlier conflicting one, whatever the timing of the run was.
    * Each queue has its own time. A copy takes ``latency_s`` + bytes / rate.

    Args:
        budget_bytes: the budget for buffers and non-model memory.
        nonmodel_trace: the non-model bytes to assume at each moment of a step, and outside of the step as its last
            value; empty: 0.
        seed: decides when copies run before anything waits for them.
        eagerness: the probability of a queued copy running at once.
        rates: the copies' rates.
        latency_s: the time to start a copy.
        pinnable_bytes: how much host memory may be pinned; None: any amount.

    Attributes:
        nonmodel_trace: see above; may be replaced between two steps.
        assumed_nonmodel_bytes: the current value of ``nonmodel_trace``.
        meter: if it is set, it gives the non-model memory instead of ``nonmodel_trace``. The budget may then be
            exceeded, because a step run only for a measurement must not fail.
        storages: contains the storages of host blocks, too, because a meter has to ignore them.
        stall_s: how long the computation waited for copies.
        peak_bytes: the peak of buffers and non-model memory together.
        num_pins: how many blocks of host memory were pinned so far.
    """

    def __init__(
        self,
        budget_bytes: int,
        nonmodel_trace: Sequence[int] = (),
        seed: int = 0,
        eagerness: float = 0.3,
        rates: Rates | None = None,
        latency_s: float = 1e-5,
        pinnable_bytes: int | None = None,
    ) -> None:
        super().__init__(budget_bytes)
        self.torch_device = torch.device("cpu")
        self.nonmodel_trace = nonmodel_trace
        self.assumed_nonmodel_bytes = nonmodel_trace[-1] if nonmodel_trace else 0
        self.stall_s = 0.0
        self.peak_bytes = 0
        self.num_pins = 0
        self.rates = rates or Rates()
        self.meter: Meter | None = None
        self._peaks = PeakCounter()
        self._pageable: list[tuple[int, int]] = []
        self._pinnable_bytes = pinnable_bytes
        self._latency_s = latency_s
        self._eagerness, self._random = eagerness, random.Random(seed)
        self._clocks = VectorClocks()
        self._queues: dict[str, deque[_Copy]] = {"upload": deque(), "download": deque()}
        self._lock = threading.RLock()

    @property
    def time_s(self) -> float:
        """The simulated time at the end of the computation queued so far."""
        return self._clocks.times.get("compute", 0.0)

    # Memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor filled with NaN."""
        tensor = super().empty(numel, dtype)
        self._poison(tensor, tensor.view(torch.uint8))
        return tensor

    @property
    def nonmodel_bytes(self) -> int:
        """The bytes of everything but buffers now."""
        return self.assumed_nonmodel_bytes if self.meter is None else self.meter.total

    def _note_peak(self) -> None:
        self._peaks.note(self.assumed_nonmodel_bytes if self.meter is None else self.meter.take_peak(), self.used_bytes)

    def acquire(self, buffer: Buffer) -> None:
        """Gives the buffer memory filled with NaN; see ``Device``."""
        with self._lock:
            if buffer.present:
                raise RuntimeError("the buffer is present already")
            total = self.used_bytes + self.assumed_nonmodel_bytes + buffer.num_bytes
            if total > self.budget_bytes:
                raise DeviceOutOfMemory(
                    f"{buffer.num_bytes} bytes more than {self.used_bytes} of buffers and "
                    f"{self.assumed_nonmodel_bytes} of non-model memory exceed the budget of {self.budget_bytes}"
                )
            buffer.storage.resize_(buffer.num_bytes)
            buffer.present = True
            self._note_peak()
            self.used_bytes += buffer.num_bytes
            self._note_peak()
            self.peak_bytes = max(self.peak_bytes, total)
            self._poison(buffer, buffer.view(torch.uint8, 0, (buffer.num_bytes,)))

    def release(self, buffer: Buffer) -> None:
        """Takes the memory back; see ``Device``."""
        with self._lock:
            if not buffer.present:
                raise RuntimeError("the buffer was released before")
            self._poison(buffer, buffer.view(torch.uint8, 0, (buffer.num_bytes,)))
            buffer.present = False
            self._note_peak()
            self.used_bytes -= buffer.num_bytes

    def _poison(self, memory: Memory, content: Tensor) -> None:
        self.computes_on(memory, write=True)
        content.fill_(_POISON)

    def _pin(self, memory: Tensor) -> str | None:
        self.storages.add(memory.untyped_storage()._cdata)
        if self._pinnable_bytes is not None and self.pinned_bytes + memory.nbytes > self._pinnable_bytes:
            self._pageable.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
            return f"the limit is {self._pinnable_bytes:,} bytes"
        self.num_pins += 1
        return None

    def unpin(self, memory: Tensor, pinned: bool) -> None:
        """Undoes ``pin``."""
        super().unpin(memory, pinned)
        self.storages.discard(memory.untyped_storage()._cdata)
        if not pinned:
            self._pageable.remove((memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    def _unpin(self, memory: Tensor) -> None:
        """Does nothing: there is no system resource behind a simulated pin."""

    def begin_moment(self, number: int) -> Peaks:
        """Starts moment ``number`` of the step; see ``Device``."""
        with self._lock:
            self._note_peak()
            before = self._peaks.take()
            if self.nonmodel_trace and self.meter is None:
                self.assumed_nonmodel_bytes = self.nonmodel_trace[min(number, len(self.nonmodel_trace) - 1)]
            total = self.used_bytes + self.assumed_nonmodel_bytes
            if total > self.budget_bytes:
                raise DeviceOutOfMemory(
                    f"{self.assumed_nonmodel_bytes} bytes of non-model memory and {self.used_bytes} of buffers exceed "
                    f"the budget of {self.budget_bytes}"
                )
            self.peak_bytes = max(self.peak_bytes, total)
            self._note_peak()
            return before

    def mark(self) -> float:
        """Returns the time now."""
        return time.perf_counter()

    def seconds_between(self, begin: float, end: float) -> float:
        """Returns the time between two marks."""
        return end - begin

    # Copies

    def upload(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[SimulatedEvent]) -> SimulatedEvent:
        """Queues a copy to the device."""
        self.uploaded_bytes += source.nbytes
        return self._copy("upload", source, target, memory, after)

    def download(
        self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[SimulatedEvent]
    ) -> SimulatedEvent:
        """Queues a copy to the host."""
        self.downloaded_bytes += source.nbytes
        return self._copy("download", source, target, memory, after)

    def _copy(
        self, queue: str, source: Tensor, target: Tensor, memory: Memory, after: Sequence[SimulatedEvent]
    ) -> SimulatedEvent:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(f"a copy changes nothing: {source.shape} {source.dtype} to {target.shape} {target.dtype}")
        with self._lock:
            self._clocks.enqueue(queue)
            for event in after:
                self._clocks.join(queue, event.clock, event.time_s)
            up = queue == "upload"
            self._clocks.access(queue, source.data_ptr() if up else self._clocks.key(memory), write=False)
            self._clocks.access(queue, self._clocks.key(memory) if up else target.data_ptr(), write=True)
            self._clocks.times[queue] += self._latency_s + source.nbytes / self._rate(queue, source, target)
            copy = _Copy(
                _deferred_copy(source, target, memory), [event.copy for event in after if event.copy is not None]
            )
            self._queues[queue].append(copy)
            # A real copy may be done at any time: code must neither rely on it being late nor on it being early.
            while self._queues[queue] and self._random.random() < self._eagerness:
                self._run(self._queues[queue][0])
            return SimulatedEvent(dict(self._clocks.clocks[queue]), self._clocks.times[queue], copy)

    def _rate(self, queue: str, source: Tensor, target: Tensor) -> float:
        host = (source if queue == "upload" else target).data_ptr()
        if any(begin <= host < end for begin, end in self._pageable):
            return self.rates.pageable
        return self.rates.upload if queue == "upload" else self.rates.download

    def _run(self, copy: _Copy) -> None:
        """Runs a copy, after the earlier copies of its queue and the copies it waits for."""
        if copy.done:
            return
        queue = next(queue for queue in self._queues.values() if copy in queue)
        while not copy.done:
            first = queue.popleft()
            while first.requires:
                self._run(first.requires.pop())
            first.run()
            first.done = True

    # Order

    def compute_event(self) -> SimulatedEvent:
        """See ``Device``."""
        with self._lock:
            self._clocks.enqueue("compute")
            return SimulatedEvent(dict(self._clocks.clocks["compute"]), self._clocks.times["compute"])

    def compute_waits(self, event: SimulatedEvent) -> None:
        """See ``Device``."""
        with self._lock:
            self._clocks.enqueue("compute")
            self.stall_s += max(0.0, event.time_s - self._clocks.times["compute"])
            self._clocks.join("compute", event.clock, event.time_s)
            if event.copy is not None:
                self._run(event.copy)

    def host_event(self) -> SimulatedEvent:
        """See ``Device``."""
        with self._lock:
            thread = self._clocks.thread()
            return SimulatedEvent(dict(self._clocks.clocks[thread]), self._clocks.times[thread])

    def host_waits(self, event: SimulatedEvent) -> None:
        """See ``Device``."""
        with self._lock:
            self._clocks.join(self._clocks.thread(), event.clock, event.time_s)
            if event.copy is not None:
                self._run(event.copy)

    def computes_on(self, memory: Memory, write: bool) -> None:
        """See ``Device``; checks for races."""
        with self._lock:
            self._clocks.enqueue("compute")
            self._clocks.access("compute", self._clocks.key(memory), write)

    def host_accesses(self, memory: Tensor, write: bool) -> None:
        """See ``Device``; checks for races."""
        with self._lock:
            self._clocks.access(self._clocks.thread(), memory.data_ptr(), write)

    def spend(self, seconds: float) -> None:
        """Adds simulated time to the computation."""
        with self._lock:
            self._clocks.enqueue("compute")
            self._clocks.times["compute"] += seconds

    def host_spends(self, seconds: float) -> None:
        """Adds simulated time to the calling thread."""
        with self._lock:
            self._clocks.times[self._clocks.thread()] += seconds


def _deferred_copy(source: Tensor, target: Tensor, memory: Memory) -> Callable[[], object]:
    """Returns a function for the copy.

    It holds only a weak reference to a tensor outside of buffers. A real device would not keep the tensor's memory
    either, so its owner has to.
    """
    if isinstance(memory, Buffer):
        return lambda: target.copy_(source)
    kept, up, host = weakref.ref(memory), memory is target, source if memory is target else target

    def move() -> None:
        found = kept()
        if found is None:
            raise SimulatedRace("a tensor was freed before the copy of it")
        _ = found.copy_(host) if up else host.copy_(found)

    return move
