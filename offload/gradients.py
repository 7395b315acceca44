"""The way of the gradients: from autograd to the host, where they add up, and their norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.chunks import flat, parts
from offload.device import Buffer, Device, Event
from offload.host_memory import HostBlock
from offload.slots import WEIGHT, Slot, accumulate
from offload.worker import HostWorkers, Job


class GradientPath:
    """Takes gradients away as they come, through two landings that take turns.

    A chunk's first gradient of a step goes straight to its place; later ones, and those that add up in another type
    than they move in, go to a staging block, from which a thread of the host adds them. Where no chunk has a place
    for its gradient, the thread updates the chunk from the staging block, which is all the memory that gradients need.

    Args:
        dtype: in which they move.
        num_bytes: of the largest.
        direct: whether the chunks' gradients have the type in which they move.
        reduce: see ``OffloadRuntime``.

    Attributes:
        update: where chunks are updated as their gradient comes: does that to a slot.
    """

    def __init__(
        self,
        device: Device,
        workers: HostWorkers,
        dtype: torch.dtype,
        num_bytes: int,
        direct: bool,
        reduce: Callable[[Tensor], None] | None,
    ) -> None:
        self._device, self._workers, self._dtype, self._direct = device, workers, dtype, direct
        self._reduce = reduce
        self._landings = [_Landing(device, num_bytes) for _ in range(2)]
        self.update: Callable[[Slot, Sequence[Tensor]], None] | None = None
        self.expected: dict[int, int] = {}
        """How many gradients of a chunk a step brings, as far as known; after the last its norm is taken at once."""

    def take(self, slot: Slot, gradients: Sequence[Tensor]) -> None:
        """Brings the gradients of one use under way; autograd's tensors are free on return."""
        if self.update is not None:
            if slot.arrivals:
                raise RuntimeError(
                    f"a second gradient of chunk {slot.number} of {slot.chunk.stack.name} in a step, after its update"
                )
            slot.version += 1
        if isinstance(slot.home, Buffer):
            if self._reduce is not None:
                gradients = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
                for gradient in gradients:
                    self._reduce(gradient)
            self._device.computes_on(slot.home, write=True)
            if self.update is None:
                accumulate(slot.gradients(), gradients, slot.arrivals > 0)
            else:
                gradients = [gradient.contiguous() for gradient in gradients]
                slot.measure(gradients)
                self.update(slot, gradients)
            slot.arrivals += 1
            return
        landing = self._landings.pop(0)
        self._landings.append(landing)
        landing.open(self._device)
        self._device.computes_on(landing.buffer, write=True)
        landed = list(parts(landing.buffer, slot.layout.planes[WEIGHT], self._dtype))
        accumulate(landed, gradients, False)
        if self._reduce is not None:
            for gradient in landed:
                self._reduce(gradient)
        if self.update is not None:
            self._send_to_update(slot, slot.home, landing, self.update)
            slot.arrivals += 1
            return
        self._send(slot, slot.home, landing)
        slot.arrivals += 1
        if self.expected.get(slot.number) == slot.arrivals:
            self._submit_norm(slot, slot.home)

    def _download(self, landing: _Landing, target: Tensor) -> None:
        source = landing.buffer.view(self._dtype, 0, target.shape)
        landing.sent = self._device.download(source, target, landing.buffer, [self._device.compute_event()])

    def _send(self, slot: Slot, home: HostBlock, landing: _Landing) -> None:
        total = flat(home, slot.layout.planes["gradient"])
        more = slot.arrivals > 0
        direct = self._direct and not more
        if direct:
            self._workers.wait(slot.job)
            target = total
        else:
            self._workers.wait(landing.job)
            target = landing.staging.view(self._dtype, 0, total.shape)
        self._download(landing, target)

        def add() -> None:
            if not direct:
                self._device.host_accesses(target, write=False)
                self._device.host_accesses(total, write=True)
                accumulate([total], [target], more)

        slot.job = self._workers.submit(add, [slot.job], [landing.sent])
        if not direct:
            landing.job = slot.job

    def _send_to_update(
        self, slot: Slot, home: HostBlock, landing: _Landing, update: Callable[[Slot, Sequence[Tensor]], None]
    ) -> None:
        weight = flat(home, slot.layout.planes[WEIGHT])
        self._workers.wait(landing.job)  # the staging block is free again
        target = landing.staging.view(self._dtype, 0, weight.shape)
        self._download(landing, target)

        def work() -> None:
            gradients = list(parts(landing.staging, slot.layout.planes[WEIGHT], self._dtype))
            self._device.host_accesses(target, write=False)
            self._device.host_accesses(weight, write=True)
            slot.measure(gradients)
            update(slot, gradients)

        # Not before the last upload has read the old weights.
        slot.job = slot.squares_job = landing.job = self._workers.submit(
            work, [slot.job], [landing.sent, slot.uploaded]
        )

    def _submit_norm(self, slot: Slot, home: HostBlock) -> None:
        total = flat(home, slot.layout.planes["gradient"])

        def measure() -> None:
            self._device.host_accesses(total, write=False)
            slot.measure(slot.gradients())

        slot.job = slot.squares_job = self._workers.submit(measure, [slot.job], [])

    def sum_of_squares(self, slots: Sequence[Slot]) -> float:
        """Sums per matrix, added up without rounding in between: neither chunks nor their order show in the result."""
        came = [slot for slot in slots if slot.arrivals]
        for slot in came if self.update is None else ():
            if isinstance(slot.home, Buffer):
                self._device.computes_on(slot.home, write=False)
                slot.measure(slot.gradients())
            elif slot.squares_job is None or slot.squares_job is not slot.job:
                self._submit_norm(slot, slot.home)
        squares: list[float] = []
        for slot in came:
            self._workers.wait(slot.job)
            squares.extend(slot.squares)
        return math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf

    @property
    def absent_bytes(self) -> int:
        """What the landings do not occupy yet."""
        return sum(landing.buffer.num_bytes for landing in self._landings if not landing.buffer.present)

    def free(self) -> None:
        """Gives the landings' memory on the device back."""
        for landing in self._landings:
            landing.free(self._device)

    def close(self) -> None:
        """Gives all memory back."""
        self.free()
        for landing in self._landings:
            landing.staging.free()


class _Landing:
    """Where a gradient waits on the device for its download, and on the host for being added."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.buffer = device.buffer(num_bytes)
        self.staging = HostBlock(num_bytes, device)
        self.sent: Event | None = None
        self.job: Job | None = None

    def open(self, device: Device) -> None:
        if self.sent is not None:  # its last content may still be on the way
            device.compute_waits(self.sent)
        if not self.buffer.present:
            device.acquire(self.buffer)

    def free(self, device: Device) -> None:
        if self.sent is not None:
            device.compute_waits(self.sent)
            self.sent = None
        if self.buffer.present:
            device.release(self.buffer)
