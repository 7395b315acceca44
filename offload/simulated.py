"""A device in host memory that is as unforgiving as a real one: late copies, poisoned memory, races found."""

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

from offload.device import Buffer, Device, DeviceOutOfMemory, Memory, PeakCounter, Peaks, Rates
from offload.meter import Meter

_POISON = 0xFF  # all ones is a NaN in every floating-point type
_Clock = dict[str, int]


class SimulatedRace(RuntimeError):
    """Two accesses to the same memory, one of them a write, with nothing that orders them."""


@dataclass
class _Copy:
    run: Callable[[], object]
    requires: list[_Copy]
    done: bool = False


@dataclass(frozen=True)
class SimulatedEvent:
    clock: _Clock
    time_s: float
    copy: _Copy | None = None


@dataclass
class _Accesses:
    """The last write to a piece of memory and the reads since, each as queue -> its clock then."""

    writes: _Clock = field(default_factory=dict)
    reads: _Clock = field(default_factory=dict)


class SimulatedDevice(Device):
    """Computes on the CPU and behaves like an accelerator in what can go wrong.

    * The budget holds buffers plus the non-model bytes of ``tide``, at every moment.
    * A copy happens when something that waits for it runs, or at a random earlier time: code that does not wait
      reads old data.
    * Memory that is acquired or released is filled with NaN.
    * Every queue and thread has a vector clock (Mattern 1989); an access that the clocks do not order behind an
      earlier conflicting one raises ``SimulatedRace``, whatever the timing of this run was.
    * Each queue has a time of its own: copies take ``latency_s`` + bytes / bandwidth.

    Args:
        budget_bytes: for buffers and tide together.
        tide: non-model bytes at each access of a step; beyond its end its last value; empty: none.
        seed: when copies happen that nothing waits for yet.
        eagerness: probability with which a queued copy happens at once.
        rates: of copies.
        pinnable_bytes: host memory that may be pinned; None: any.

    Attributes:
        meter: where it is given, it and not ``tide`` says what everything else occupies, beyond the budget if need
            be: a step that is measured is not refused.
        storages: those of host blocks, too: a meter has to ignore both.
        stall_s: how long the computation waited for copies.
        peak_bytes: the most that buffers and tide occupied together.
        num_pins: how many blocks of host memory were ever pinned.
    """

    def __init__(
        self,
        budget_bytes: int,
        tide: Sequence[int] = (),
        seed: int = 0,
        eagerness: float = 0.3,
        rates: Rates | None = None,
        latency_s: float = 1e-5,
        pinnable_bytes: int | None = None,
    ) -> None:
        super().__init__(budget_bytes)
        self.torch_device = torch.device("cpu")
        self.tide = tide
        self.tide_bytes = tide[-1] if tide else 0
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
        self._clocks: dict[str, _Clock] = {}
        self._times: dict[str, float] = {}
        self._queues: dict[str, deque[_Copy]] = {"upload": deque(), "download": deque()}
        self._accesses: dict[int, _Accesses] = {}
        self._main = threading.get_ident()
        self._lock = threading.RLock()

    @property
    def time_s(self) -> float:
        """When the computation that was queued so far ends."""
        return self._times.get("compute", 0.0)

    # Memory

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = super().empty(numel, dtype)
        self._poison(tensor, tensor.view(torch.uint8))
        return tensor

    @property
    def nonmodel_bytes(self) -> int:
        return self.tide_bytes if self.meter is None else self.meter.total

    def _note_peak(self) -> None:
        self._peaks.note(self.tide_bytes if self.meter is None else self.meter.take_peak(), self.used_bytes)

    def acquire(self, buffer: Buffer) -> None:
        with self._lock:
            if buffer.present:
                raise RuntimeError("the buffer is present already")
            total = self.used_bytes + self.tide_bytes + buffer.num_bytes
            if total > self.budget_bytes:
                raise DeviceOutOfMemory(
                    f"{buffer.num_bytes} bytes more than {self.used_bytes} of buffers and {self.tide_bytes} of "
                    f"non-model memory exceed the budget of {self.budget_bytes}"
                )
            buffer.storage.resize_(buffer.num_bytes)
            buffer.present = True
            self._note_peak()
            self.used_bytes += buffer.num_bytes
            self._note_peak()
            self.peak_bytes = max(self.peak_bytes, total)
            self._poison(buffer, buffer.view(torch.uint8, 0, (buffer.num_bytes,)))

    def release(self, buffer: Buffer) -> None:
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
        super().unpin(memory, pinned)
        self.storages.discard(memory.untyped_storage()._cdata)
        if not pinned:
            self._pageable.remove((memory.data_ptr(), memory.data_ptr() + memory.nbytes))

    def _unpin(self, memory: Tensor) -> None:
        """What was granted here costs nothing."""

    def begin_moment(self, number: int) -> Peaks:
        with self._lock:
            self._note_peak()
            before = self._peaks.take()
            if self.tide and self.meter is None:
                self.tide_bytes = self.tide[min(number, len(self.tide) - 1)]
            total = self.used_bytes + self.tide_bytes
            if total > self.budget_bytes:
                raise DeviceOutOfMemory(
                    f"{self.tide_bytes} bytes of non-model memory beside {self.used_bytes} of buffers exceed the "
                    f"budget of {self.budget_bytes}"
                )
            self.peak_bytes = max(self.peak_bytes, total)
            self._note_peak()
            return before

    def mark(self) -> float:
        return time.perf_counter()

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin

    # Copies

    def upload(self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[SimulatedEvent]) -> SimulatedEvent:
        self.uploaded_bytes += source.nbytes
        return self._copy("upload", source, target, memory, after)

    def download(
        self, source: Tensor, target: Tensor, memory: Memory, after: Sequence[SimulatedEvent]
    ) -> SimulatedEvent:
        self.downloaded_bytes += source.nbytes
        return self._copy("download", source, target, memory, after)

    def _copy(
        self, queue: str, source: Tensor, target: Tensor, memory: Memory, after: Sequence[SimulatedEvent]
    ) -> SimulatedEvent:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(f"a copy changes nothing: {source.shape} {source.dtype} to {target.shape} {target.dtype}")
        with self._lock:
            self._enqueue(queue)
            for event in after:
                self._join(queue, event)
            up = queue == "upload"
            self._access(queue, source.data_ptr() if up else self._key(memory), write=False)
            self._access(queue, self._key(memory) if up else target.data_ptr(), write=True)
            self._times[queue] += self._latency_s + source.nbytes / self._rate(queue, source, target)
            copy = _Copy(_moving(source, target, memory), [event.copy for event in after if event.copy is not None])
            self._queues[queue].append(copy)
            while self._queues[queue] and self._random.random() < self._eagerness:
                self._run(self._queues[queue][0])
            return SimulatedEvent(dict(self._clocks[queue]), self._times[queue], copy)

    def _rate(self, queue: str, source: Tensor, target: Tensor) -> float:
        host = (source if queue == "upload" else target).data_ptr()
        if any(begin <= host < end for begin, end in self._pageable):
            return self.rates.pageable
        return self.rates.upload if queue == "upload" else self.rates.download

    def _run(self, copy: _Copy) -> None:
        """Runs a copy, behind those before it in its queue and those that it waits for."""
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
        with self._lock:
            self._enqueue("compute")
            return SimulatedEvent(dict(self._clocks["compute"]), self._times["compute"])

    def compute_waits(self, event: SimulatedEvent) -> None:
        with self._lock:
            self._enqueue("compute")
            self.stall_s += max(0.0, event.time_s - self._times["compute"])
            self._join("compute", event)
            if event.copy is not None:
                self._run(event.copy)

    def host_event(self) -> SimulatedEvent:
        with self._lock:
            thread = self._thread()
            return SimulatedEvent(dict(self._clocks[thread]), self._times[thread])

    def host_waits(self, event: SimulatedEvent) -> None:
        with self._lock:
            self._join(self._thread(), event)
            if event.copy is not None:
                self._run(event.copy)

    def computes_on(self, memory: Memory, write: bool) -> None:
        with self._lock:
            self._enqueue("compute")
            self._access("compute", self._key(memory), write)

    def host_accesses(self, memory: Tensor, write: bool) -> None:
        with self._lock:
            self._access(self._thread(), memory.data_ptr(), write)

    def spend(self, seconds: float) -> None:
        """Lets the computation take time."""
        with self._lock:
            self._enqueue("compute")
            self._times["compute"] += seconds

    def _thread(self) -> str:
        ident = threading.get_ident()
        name = "main" if ident == self._main else f"thread {ident}"
        self._tick(name)
        return name

    def _enqueue(self, queue: str) -> None:
        """Work for a queue comes behind what the thread that queues it has done."""
        thread = self._thread()
        self._tick(queue)
        self._join(queue, SimulatedEvent(self._clocks[thread], self._times[thread]))

    def _tick(self, name: str) -> None:
        clock = self._clocks.setdefault(name, {})
        clock[name] = clock.get(name, 0) + 1
        self._times.setdefault(name, 0.0)

    def _join(self, name: str, event: SimulatedEvent) -> None:
        clock = self._clocks[name]
        for other, count in event.clock.items():
            clock[other] = max(clock.get(other, 0), count)
        self._times[name] = max(self._times[name], event.time_s)

    def _key(self, memory: Memory) -> int:
        """By which accesses to a piece of the device's memory are found; those to a tensor's end with its storage."""
        if isinstance(memory, Buffer):
            return id(memory)
        storage = memory.untyped_storage()
        key = storage._cdata
        if key not in self._accesses:
            weakref.finalize(storage, self._accesses.pop, key, None)
        return key

    def _access(self, name: str, memory: int, write: bool) -> None:
        clock, accesses = self._clocks[name], self._accesses.setdefault(memory, _Accesses())
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


def _moving(source: Tensor, target: Tensor, memory: Memory) -> Callable[[], object]:
    """The copy. It does not keep a tensor of PyTorch's own: on a real device its memory could be another's by then."""
    if isinstance(memory, Buffer):
        return lambda: target.copy_(source)
    kept, up, host = weakref.ref(memory), memory is target, source if memory is target else target

    def move() -> None:
        found = kept()
        if found is None:
            raise SimulatedRace("a tensor was freed before the copy of it")
        _ = found.copy_(host) if up else host.copy_(found)

    return move
