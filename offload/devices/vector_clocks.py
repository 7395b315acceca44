"""Vector clocks (Mattern 1989) of queues and threads, which find accesses to memory that nothing orders."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

from torch import Tensor

from offload.devices.device import Buffer, Memory

Clock = dict[str, int]


class SimulatedRace(RuntimeError):
    """Two accesses to the same memory, one of them a write, with nothing that orders them."""


@dataclass
class _Accesses:
    """The last write to a piece of memory and the reads since then, each as queue -> its clock at that time."""

    writes: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)


class VectorClocks:
    """A vector clock and a simulated time for each queue and each thread, and the accesses to memory.

    An access has to be ordered behind earlier conflicting ones by the clocks. So races are found whatever the timing of
    a run was. The caller holds a lock.

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
        """Adds work to a queue, which is ordered behind everything that the calling thread has done."""
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
