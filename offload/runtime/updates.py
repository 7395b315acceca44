"""Updates of chunks: at once, or one step late and overlapped with the whole next step.

The gradients of several uses of a chunk are first added up on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.devices.device import Device
from offload.memory.host_memory import HostBlock
from offload.memory.layout import plane_values
from offload.optimizer.settings import OptimizerSettings
from offload.runtime.slots import WEIGHT, Slot
from offload.runtime.workers import HostWorkers


class GradientSums:
    """Sums of gradients of consecutive uses of a chunk, for example by interleaved micro-batches.

    The sum of two gradients is rounded once. Three or more are accumulated in fp32 and rounded at their end.

    Args:
        number: the number of uses in one sum.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._begun: dict[int, tuple[int, Sequence[Tensor]]] = {}

    def add(self, chunk: int, gradients: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Returns the complete sum, or None if gradients of later uses are still missing."""
        if self._number == 1:
            return gradients
        count, sums = self._begun.pop(chunk, (0, ()))
        if count:
            # The first summand comes from autograd; if it has 16 bits, widening it only now loses nothing.
            sums = [self._widened(total) + gradient for total, gradient in zip(sums, gradients, strict=True)]
        else:
            sums = gradients
        if count + 1 < self._number:
            self._begun[chunk] = count + 1, sums
            return None
        return [total.to(gradient.dtype) for total, gradient in zip(sums, gradients, strict=True)]

    def _widened(self, total: Tensor) -> Tensor:
        return total if self._number == 2 else total.to(torch.promote_types(total.dtype, torch.float32))

    @property
    def unfinished(self) -> list[int]:
        """The chunks with incomplete sums."""
        return sorted(self._begun)


@dataclass(frozen=True)
class DelayedUpdate:
    """An update to be started at the begin of the next step.

    Attributes:
        learning_rate, coefficient: see ``OffloadRuntime.step``.
    """

    learning_rate: float
    coefficient: float


class Updates:
    """Updates chunks where they are: on the host with its threads, or on the device.

    Args:
        late: an update begins with the next step, and that step still reads the old weights.

    Attributes:
        late: see above.
        number: the number of begun updates; the optimizer's arithmetic depends on it.
        waiting: the late update; None: there is none.
    """

    def __init__(
        self, device: Device, workers: HostWorkers, optimizer: OptimizerSettings, slots: Sequence[Slot], late: bool
    ) -> None:
        self._device, self._workers, self._optimizer, self._slots = device, workers, optimizer, slots
        self.late, self.number = late, 0
        self.waiting: DelayedUpdate | None = None

    def update(self, slots: Iterable[Slot], learning_rate: float, coefficient: float) -> None:
        """Updates these chunks in this order, or registers a late update; see ``OffloadRuntime.step``."""
        if self.late:
            self.wait_with(slots, DelayedUpdate(learning_rate, coefficient))
        else:
            self.number += 1
            for slot in slots:
                slot.version += 1  # replicas of the old weights must not be used from here on
                self._submit(slot, learning_rate, coefficient)

    def wait_with(self, slots: Iterable[Slot], update: DelayedUpdate) -> None:
        """Registers a late update of these chunks in this order."""
        self.waiting = update
        for order, slot in enumerate(slots):
            slot.waits, slot.order = True, order

    def begin_step(self) -> None:
        """Begins the late update, if there is one."""
        if self.waiting is None:
            return
        self.number += 1
        for slot in sorted((slot for slot in self._slots if slot.waits), key=lambda slot: slot.order):
            slot.waits, slot.unpublished = False, True
            self._submit(slot, self.waiting.learning_rate, self.waiting.coefficient)
        self.waiting = None

    def publish(self) -> None:
        """Waits for the late updates of this step and publishes the new weights."""
        for slot in self._slots:
            if slot.unpublished:
                self._workers.wait(slot.job)
                slot.publish()

    def _submit(self, slot: Slot, learning_rate: float, coefficient: float) -> None:
        arguments = (self._optimizer, self.number, learning_rate, coefficient)
        if slot.owned:
            self._device.computes_on(slot.device_memory, write=True)
            slot.update(*arguments, slot.gradients())
            return

        def work() -> None:
            assert isinstance(slot.home, HostBlock)
            planes = slot.planes
            self._device.host_accesses(plane_values(slot.home, planes[WEIGHT]), write=not self.late)
            self._device.host_accesses(plane_values(slot.home, planes["gradient"]), write=False)
            if self.late:
                self._device.host_accesses(plane_values(slot.home, planes["next_weight"]), write=True)
            slot.update(*arguments, slot.gradients())

        # An upload may still read the memory written by the update.
        slot.job = self._workers.submit(work, [slot.job], [slot.uploaded])
