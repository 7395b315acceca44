"""Moves gradients from autograd to the host, accumulates them there, and computes their norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.devices.device import Buffer, Device, Event
from offload.memory.host_memory import HostBlock
from offload.memory.layout import plane_tensors, plane_values
from offload.runtime.slots import WEIGHT, Slot, accumulate
from offload.runtime.updates import GradientSums
from offload.runtime.workers import HostWorkers, Job


class GradientOffload:
    """Downloads gradients as soon as they are computed, through two pairs of staging memory used in turn.

    The first gradient of a chunk in a step is copied directly to the chunk's memory. Later gradients are copied to
    staging memory on the host, and a host thread adds them. If gradients are accumulated in another type than they are
    moved in, all of them take this second way. With ``update`` the thread instead updates the chunk from the staging
    memory, so no other memory holds gradients.

    Args:
        device: the accelerator.
        workers: the host threads.
        dtype: the type in which gradients are moved.
        num_bytes: the size of the largest chunk's gradient.
        direct: whether the chunks' gradients are stored in ``dtype``.
        reduce: see ``OffloadRuntime``.
        uses_at_once: see ``OffloadRuntime``.

    Attributes:
        update: updates a slot with its gradients, if updates happen in the backward pass; None otherwise.
        expected: chunk -> how many gradients it gets in a step, as far as known. After the last one its norm is
            computed at once.
    """

    def __init__(
        self,
        device: Device,
        workers: HostWorkers,
        dtype: torch.dtype,
        num_bytes: int,
        direct: bool,
        reduce: Callable[[Tensor], None] | None,
        uses_at_once: int,
    ) -> None:
        self._device, self._workers, self._dtype, self._direct = device, workers, dtype, direct
        self._reduce, self._sums = reduce, GradientSums(uses_at_once)
        self._pairs = [_StagingPair(device, num_bytes) for _ in range(2)]
        self.update: Callable[[Slot, Sequence[Tensor]], None] | None = None
        self.expected: dict[int, int] = {}

    def take(self, slot: Slot, gradients: Sequence[Tensor]) -> None:
        """Takes the gradients of one use, and starts to move them or their sum; the caller gives the tensors away.

        Raises:
            RuntimeError: the chunk was already updated in this step, or its weights' memory already has a gradient.
        """
        total = self._sums.add(slot.number, gradients)
        if total is not None:
            self._take_sum(slot, total)

    def _take_sum(self, slot: Slot, gradients: Sequence[Tensor]) -> None:
        if slot.rotates:
            self._take_place_of_weights(slot)
        if self.update is not None:
            if slot.num_gradients:
                raise RuntimeError(
                    f"a second gradient of chunk {slot.number} of {slot.chunk.stack.name} in a step, after its update"
                )
            slot.version += 1
        if isinstance(slot.home, Buffer):  # the gradients stay on the device
            if self._reduce is not None:
                # Autograd may still use its tensors, so they must not be reduced in place.
                gradients = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
                for gradient in gradients:
                    self._reduce(gradient)
            self._device.computes_on(slot.home, write=True)
            if self.update is None:
                accumulate(slot.gradients(), gradients, slot.num_gradients > 0)
            else:
                gradients = [gradient.contiguous() for gradient in gradients]
                slot.measure(gradients)
                self.update(slot, gradients)
            slot.num_gradients += 1
            return
        staging = self._pairs.pop(0)
        self._pairs.append(staging)
        staging.open(self._device)
        self._device.computes_on(staging.buffer, write=True)
        staged = list(plane_tensors(staging.buffer, slot.planes[WEIGHT], self._dtype))
        accumulate(staged, gradients, False)
        if self._reduce is not None:
            for gradient in staged:
                self._reduce(gradient)
        if self.update is not None:
            self._send_to_update(slot, slot.home, staging, self.update)
            slot.num_gradients += 1
            return
        self._send(slot, slot.home, staging)
        slot.num_gradients += 1
        if self.expected.get(slot.number) == slot.num_gradients:
            self._submit_norm(slot, slot.home)

    def _take_place_of_weights(self, slot: Slot) -> None:
        """Publishes the chunk's new weights: after its last use in this step, the gradient may replace the old ones."""
        if slot.num_gradients:
            raise RuntimeError(
                f"a second gradient of chunk {slot.number} of {slot.chunk.stack.name} in a step, whose first one took "
                "the place of the weights"
            )
        if slot.unpublished:
            self._workers.wait(slot.job)
            slot.publish()

    def _download(self, staging: _StagingPair, target: Tensor) -> None:
        source = staging.buffer.view(self._dtype, 0, target.shape)
        staging.sent = self._device.download(source, target, staging.buffer, [self._device.compute_event()])

    def _send(self, slot: Slot, home: HostBlock, staging: _StagingPair) -> None:
        """Downloads gradients into the chunk's memory, or adds them to the values there."""
        total = plane_values(home, slot.planes["gradient"])
        more = slot.num_gradients > 0
        direct = self._direct and not more
        if direct:
            # The host may still update the chunk from its last gradients. This download would overwrite them.
            self._workers.wait(slot.job)
            target = total
        else:
            self._workers.wait(staging.job)
            target = staging.host_block.view(self._dtype, 0, total.shape)
        self._download(staging, target)

        def add() -> None:
            if not direct:
                self._device.host_accesses(target, write=False)
                self._device.host_accesses(total, write=True)
                accumulate([total], [target], more)

        slot.job = self._workers.submit(add, [slot.job], [staging.sent])
        if not direct:
            staging.job = slot.job

    def _send_to_update(
        self, slot: Slot, home: HostBlock, staging: _StagingPair, update: Callable[[Slot, Sequence[Tensor]], None]
    ) -> None:
        """Downloads gradients to staging memory; a host thread updates the chunk from there."""
        weight = plane_values(home, slot.planes[WEIGHT])
        self._workers.wait(staging.job)  # until the host has used the staging block's last content
        target = staging.host_block.view(self._dtype, 0, weight.shape)
        self._download(staging, target)

        def work() -> None:
            gradients = list(plane_tensors(staging.host_block, slot.planes[WEIGHT], self._dtype))
            self._device.host_accesses(target, write=False)
            self._device.host_accesses(weight, write=True)
            slot.measure(gradients)
            update(slot, gradients)

        # The update must not start before the last upload has read the old weights.
        slot.job = slot.squares_job = staging.job = self._workers.submit(
            work, [slot.job], [staging.sent, slot.uploaded]
        )

    def _submit_norm(self, slot: Slot, home: HostBlock) -> None:
        """Lets a host thread compute the chunk's sums of squares."""
        total = plane_values(home, slot.planes["gradient"])

        def measure() -> None:
            self._device.host_accesses(total, write=False)
            slot.measure(slot.gradients())

        slot.job = slot.squares_job = self._workers.submit(measure, [slot.job], [])

    def move_out(self, slots: Sequence[Slot]) -> list[Tensor]:
        """See ``OffloadRuntime.take_gradients``."""
        found = []
        for slot in slots:
            self._workers.wait(slot.job)
            for gradient in slot.gradients():
                if slot.num_gradients:
                    found.append(gradient.to("cpu", torch.float32, copy=True))
                else:
                    found.append(torch.zeros(gradient.shape))
            slot.num_gradients, slot.squares_job = 0, None
        return found

    def move_in(self, slots: Sequence[Slot], gradients: Sequence[Tensor]) -> None:
        """See ``OffloadRuntime.put_gradients``."""
        values = iter(gradients)
        for slot in slots:
            self._workers.wait(slot.job)
            for target in slot.gradients():
                target.copy_(next(values))
            slot.num_gradients, slot.squares_job = 1, None

    def sum_of_squares(self, slots: Sequence[Slot]) -> float:
        """Returns the sum of squares of all gradients; infinite if one is not finite.

        ``math.fsum`` adds the matrices' sums exactly. So the result does not depend on the chunks or on their order.
        """
        with_gradients = [slot for slot in slots if slot.num_gradients]
        for slot in with_gradients if self.update is None else ():
            if isinstance(slot.home, Buffer):
                self._device.computes_on(slot.home, write=False)
                slot.measure(slot.gradients())
            elif slot.squares_job is None or slot.squares_job is not slot.job:
                self._submit_norm(slot, slot.home)
        squares: list[float] = []
        for slot in with_gradients:
            self._workers.wait(slot.job)
            squares.extend(slot.squares)
        return math.fsum(squares) if all(map(math.isfinite, squares)) else math.inf

    @property
    def absent_bytes(self) -> int:
        """The bytes of device buffers not yet present."""
        return sum(staging.buffer.num_bytes for staging in self._pairs if not staging.buffer.present)

    def end_step(self) -> None:
        """Releases the buffers on the device.

        Raises:
            RuntimeError: the gradients of some uses are missing, so a sum is incomplete.
        """
        if self._sums.unfinished:
            raise RuntimeError(f"the step ends, but the gradients of chunks {self._sums.unfinished} are not complete")
        self._free_buffers()

    def _free_buffers(self) -> None:
        for staging in self._pairs:
            staging.free(self._device)

    def close(self) -> None:
        """Frees all memory on the device and on the host."""
        self._free_buffers()
        for staging in self._pairs:
            staging.host_block.free()


class _StagingPair:
    """A pair of staging memory for downloads: a buffer on the device and a block on the host.

    Attributes:
        sent: the end of the last download from the buffer.
        job: the last host job on the host block.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.buffer = device.buffer(num_bytes)
        self.host_block = HostBlock(num_bytes, device)
        self.sent: Event | None = None
        self.job: Job | None = None

    def open(self, device: Device) -> None:
        """Prepares the buffer for new content."""
        if self.sent is not None:  # the download of its last content may still run
            device.compute_waits(self.sent)
        if not self.buffer.present:
            device.acquire(self.buffer)

    def free(self, device: Device) -> None:
        """Releases the buffer."""
        if self.sent is not None:
            device.compute_waits(self.sent)
            self.sent = None
        if self.buffer.present:
            device.release(self.buffer)
