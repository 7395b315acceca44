"""The weights of chunks on the device: prefetched, kept and dropped by the plan.

A cursor is the position of a running step in its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.devices.device import Device
from offload.memory.host_memory import HostBlock
from offload.memory.layout import plane_values
from offload.plan.placement import PlacementPlan
from offload.runtime.gradients import GradientOffload
from offload.runtime.recorder import StepRecorder
from offload.runtime.slots import WEIGHT, Slot
from offload.runtime.workers import HostWorkers


@dataclass
class Statistics:
    """Counts deviations from the plan.

    Attributes:
        num_misses: uses of chunks outside of the plan.
        num_evictions: chunks dropped early for lack of memory.
    """

    num_misses: int = 0
    num_evictions: int = 0


class PlanCursor:
    """Finds each use of a step in the plan.

    Args:
        plan: the step's plan.
        statistics: counts uses out of the planned order.
    """

    def __init__(self, plan: PlacementPlan, statistics: Statistics) -> None:
        self.plan, self._statistics, self._position = plan, statistics, 0

    def restart(self) -> None:
        """Starts a step."""
        self._position = 0

    def locate(self, number: int) -> int:
        """Returns the moment of the plan for this use of chunk ``number``.

        It is the chunk's first moment from the expected one on. The search wraps around at the end of the step. A chunk
        without a use in the plan gets the expected moment.
        """
        moments = self.plan.trace.moments
        for offset in range(len(moments)):
            position = (self._position + offset) % len(moments)
            if moments[position].chunk == number:
                self._statistics.num_misses += offset > 0
                self._position = position + 1
                return position
        self._statistics.num_misses += 1
        return self._position % len(moments)

    def used_last(self, candidates: Sequence[int], now: int) -> int:
        """Returns the candidate with the latest next use after moment ``now``; no further use counts as latest."""
        moments = self.plan.trace.moments
        next_use = {moments[time].chunk: time for time in range(len(moments) - 1, now - 1, -1)}
        return max(candidates, key=lambda number: next_use.get(number, len(moments)))


class WeightCache:
    """Uploads, pins and drops the weights of chunks. It follows a plan if it has one.

    Without a plan, weights are uploaded when they are used and dropped afterwards.

    Args:
        device: the accelerator.
        slots: the chunks' memory.
        workers: the host threads for updates.
        gradients: their staging buffers need memory, too.
        recorder: records every use.
        statistics: counts evictions.
        late: updates write to ``next_weight`` planes, so uploads need not wait for the host.

    Attributes:
        evaluating: uses are outside of a step, so they are not recorded and not looked up in the plan.
    """

    def __init__(
        self,
        device: Device,
        slots: Sequence[Slot],
        workers: HostWorkers,
        gradients: GradientOffload,
        recorder: StepRecorder,
        statistics: Statistics,
        late: bool,
    ) -> None:
        self._late = late
        self._device, self._slots, self._workers = device, slots, workers
        self._gradients, self._recorder, self._statistics = gradients, recorder, statistics
        self._cursor: PlanCursor | None = None
        self._pinned: set[int] = set()  # chunks in use
        self.evaluating = False

    @property
    def plan(self) -> PlacementPlan | None:
        """The current plan; None: weights are uploaded on demand."""
        return None if self._cursor is None else self._cursor.plan

    def follow(self, plan: PlacementPlan) -> None:
        """Sets the plan for the next step and later ones."""
        self._cursor = PlanCursor(plan, self._statistics)

    def pin(self, slot: Slot, backward: bool) -> None:
        """Begins a use: computation queued from now on reads the weights."""
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
        self._pinned.add(slot.number)
        slot.last_use = now
        self._device.computes_on(slot.device_memory, write=False)
        if self.plan is not None and not self.evaluating:
            self._prefetch(self.plan, now)

    def unpin(self, slot: Slot) -> None:
        """Ends a use."""
        slot.pins -= 1
        if slot.pins > 0:
            return
        self._pinned.remove(slot.number)
        kept = self.plan is not None and not self.evaluating and self.plan.keep[slot.last_use]
        if not slot.owned and not kept:
            self._drop(slot)

    def end_step(self) -> None:
        """Drops all weights.

        Raises:
            RuntimeError: a chunk is in use.
        """
        for slot in self._slots:
            if slot.pins:
                raise RuntimeError(f"the step ends while chunk {slot.number} of {slot.chunk.stack.name} is in use")
            if slot.replica.present:
                self._drop(slot)
        if self._cursor is not None:
            self._cursor.restart()

    def _arrive(self, slot: Slot, backward: bool) -> int:
        """Records a use, makes room for it and for non-model memory, and returns its moment in the plan."""
        now = 0
        if self._cursor is not None:
            # The larger of planned and present non-model memory: the model may allocate more until the next use.
            now = self._cursor.locate(slot.number)
            others = max(self._cursor.plan.trace.moments[now].nonmodel_bytes, self._device.nonmodel_bytes)
            room = self._device.budget_bytes - others
            fetched = 0 if slot.owned or slot.replica.present else slot.replica.num_bytes
            self._evict_to(room - fetched - self._gradients.absent_bytes, self._cursor, now)
        pinned = tuple(sorted(self._pinned - {slot.number}))
        self._recorder.arrive(slot.number, backward, pinned)
        return now

    def _upload(self, slot: Slot) -> None:
        """Starts to upload a chunk's weights, after the host's last work on them."""
        if not self._late:  # a delayed update never writes published weights
            self._workers.wait(slot.job)
        assert isinstance(slot.home, HostBlock)
        self._device.acquire(slot.replica)
        source = plane_values(slot.home, slot.planes[WEIGHT])
        target = slot.replica.view(source.dtype, 0, source.shape)
        slot.ready = slot.uploaded = self._device.upload(source, target, slot.replica, [self._device.compute_event()])
        slot.replica_version = slot.version

    def _prefetch(self, plan: PlacementPlan, now: int) -> None:
        """Starts the uploads for the next uses, while they fit and the host has finished the chunks' updates."""
        moments = plan.trace.moments
        peak = moments[now].nonmodel_bytes
        for moment in moments[now + 1 : now + 1 + plan.prefetch_depth]:
            slot = self._slots[moment.chunk]
            peak = max(peak, moment.nonmodel_bytes)
            if slot.owned or slot.replica.present:
                continue
            # An upload must read updated weights. Waiting for the update here would stop the computation.
            late = not self._late and slot.job is not None and not slot.job.done()
            need = slot.replica.num_bytes + self._gradients.absent_bytes
            # Later uses are not tried: weights of an earlier use would then come too late.
            if late or self._device.used_bytes + need > self._device.budget_bytes - peak:
                return
            self._upload(slot)

    def _evict_to(self, room_bytes: int, cursor: PlanCursor, now: int) -> None:
        """Drops chunks not in use until the rest fit, those with the latest next use first."""
        while self._device.used_bytes > room_bytes:
            idle = [slot.number for slot in self._slots if slot.replica.present and slot.pins == 0]
            if not idle:
                return  # nothing can be dropped; the device raises an error if its budget is exceeded
            self._drop(self._slots[cursor.used_last(idle, now)])
            self._statistics.num_evictions += 1

    def _drop(self, slot: Slot) -> None:
        """Drops a chunk's weights. Nothing is written back, because the host has the same weights."""
        if slot.ready is not None:
            self._device.compute_waits(slot.ready)
            slot.ready = None
        self._device.release(slot.replica)
