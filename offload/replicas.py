"""The weights of chunks on the device: they come in time, stay while they are used or planned to, and are dropped."""

from __future__ import annotations

from collections.abc import Sequence

from offload.chunks import flat
from offload.device import Device
from offload.follower import PlanFollower, Statistics
from offload.gradients import GradientPath
from offload.host_memory import HostBlock
from offload.plan import Plan
from offload.recorder import StepRecorder
from offload.slots import WEIGHT, Slot
from offload.worker import HostWorkers


class Replicas:
    """Pins, fetches and drops the weights of ``slots``, by a plan where there is one.

    Args:
        gradients: need room beside the weights.
        recorder: is told every use.

    Attributes:
        evaluating: uses belong to no step.
    """

    def __init__(
        self,
        device: Device,
        slots: Sequence[Slot],
        workers: HostWorkers,
        gradients: GradientPath,
        recorder: StepRecorder,
        statistics: Statistics,
    ) -> None:
        self._device, self._slots, self._workers = device, slots, workers
        self._gradients, self._recorder, self._statistics = gradients, recorder, statistics
        self._follower: PlanFollower | None = None
        self.evaluating = False

    @property
    def plan(self) -> Plan | None:
        """What is followed."""
        return None if self._follower is None else self._follower.plan

    def follow(self, plan: Plan) -> None:
        """From the next step on."""
        self._follower = PlanFollower(plan, self._statistics)

    def pin(self, slot: Slot, backward: bool) -> None:
        """A use begins: the computation that is queued next finds the weights."""
        now = 0 if self.evaluating else self._arrive(slot, backward)
        if not slot.owned:
            if not slot.replica.present:
                self._upload(slot)
            if slot.ready is not None:
                self._device.compute_waits(slot.ready)
                slot.ready = None
            assert slot.replica_version == slot.version, "a replica of old weights"
        if not self.evaluating:
            self._recorder.start()
        slot.pins += 1
        slot.last_use = now
        self._device.computes_on(slot.device_memory, write=False)
        if self.plan is not None and not self.evaluating:
            self._prefetch(self.plan, now)

    def unpin(self, slot: Slot) -> None:
        """A use ends."""
        slot.pins -= 1
        kept = self.plan is not None and not self.evaluating and self.plan.keep[slot.last_use]
        if slot.pins == 0 and not slot.owned and not kept:
            self._drop(slot)

    def end_step(self) -> None:
        """Empties the device of replicas."""
        for slot in self._slots:
            if slot.pins:
                raise RuntimeError(f"the step ends while chunk {slot.number} of {slot.chunk.stack.name} is in use")
            if slot.replica.present:
                self._drop(slot)
        if self._follower is not None:
            self._follower.restart()

    def _arrive(self, slot: Slot, backward: bool) -> int:
        """Notes the use, makes room for what it needs beside chunks, and returns its number in the plan's step."""
        now = 0
        if self._follower is not None:
            now = self._follower.locate(slot.number)
            others = max(self._follower.plan.trace.moments[now].nonmodel_bytes, self._device.nonmodel_bytes)
            room = self._device.budget_bytes - others
            fetched = 0 if slot.owned or slot.replica.present else slot.replica.num_bytes
            self._evict_to(room - fetched - self._gradients.absent_bytes, self._follower, now)
        pinned = tuple(other.number for other in self._slots if other.pins and other is not slot)
        self._recorder.arrive(slot.number, backward, pinned)
        return now

    def _upload(self, slot: Slot) -> None:
        self._workers.wait(slot.job)
        assert isinstance(slot.home, HostBlock)
        self._device.acquire(slot.replica)
        source = flat(slot.home, slot.layout.planes[WEIGHT])
        target = slot.replica.view(source.dtype, 0, source.shape)
        slot.ready = slot.uploaded = self._device.upload(source, target, slot.replica, [self._device.compute_event()])
        slot.replica_version = slot.version

    def _prefetch(self, plan: Plan, now: int) -> None:
        """Starts the uploads of the next uses, as far as they fit and the host has finished their update."""
        moments = plan.trace.moments
        peak = moments[now].nonmodel_bytes
        for moment in moments[now + 1 : now + 1 + plan.prefetch_depth]:
            slot = self._slots[moment.chunk]
            peak = max(peak, moment.nonmodel_bytes)
            if slot.owned or slot.replica.present:
                continue
            late = slot.job is not None and not slot.job.done()
            need = slot.replica.num_bytes + self._gradients.absent_bytes
            if late or self._device.used_bytes + need > self._device.budget_bytes - peak:
                return
            self._upload(slot)

    def _evict_to(self, room_bytes: int, follower: PlanFollower, now: int) -> None:
        """Drops chunks that are not in use, the one that is used last first, until the others fit into the room."""
        while self._device.used_bytes > room_bytes:
            idle = [slot.number for slot in self._slots if slot.replica.present and slot.pins == 0]
            if not idle:
                return  # what is missing then is for the device to say
            self._drop(self._slots[follower.used_last(idle, now)])
            self._statistics.num_evictions += 1

    def _drop(self, slot: Slot) -> None:
        """The host has the same weights: nothing is written back."""
        if slot.ready is not None:
            self._device.compute_waits(slot.ready)
            slot.ready = None
        self._device.release(slot.replica)
