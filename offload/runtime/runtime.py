"""The runtime: streams chunks to the device, moves gradients to the host, and updates chunks there.

The values of a stack lie in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from offload.devices.device import Device, Peaks
from offload.memory.host_memory import HostBlock
from offload.memory.layout import Chunk, NextWeights, Stack, in_mib, lay_out, sizes_of, staging_bytes, window_bytes
from offload.optimizer.settings import OptimizerSettings
from offload.plan.placement import PlacementPlan
from offload.plan.trace import Trace
from offload.runtime.activations import ActivationOffload
from offload.runtime.gradients import GradientOffload
from offload.runtime.recorder import StepRecorder
from offload.runtime.slots import LATE_GRADIENT, WEIGHT, Slot
from offload.runtime.updates import DelayedUpdate, Updates
from offload.runtime.weight_cache import Statistics, WeightCache
from offload.runtime.workers import HostWorkers


def read_values(slots: Sequence[Slot], kind: str) -> dict[str, Tensor]:
    """See ``OffloadRuntime.read``.

    Args:
        slots: of all chunks of the stack, in their order.
    """
    pieces = [slot.read(kind) for slot in slots]
    names = slots[0].chunk.stack.matrices
    return {name: torch.cat(values) for name, values in zip(names, zip(*pieces, strict=True), strict=True)}


def write_values(slots: Sequence[Slot], kind: str, values: dict[str, Tensor], optimizer: OptimizerSettings) -> None:
    """See ``OffloadRuntime.write``."""
    stack = slots[0].chunk.stack
    for name, shape in stack.matrices.items():
        expected: tuple[int, ...] = (stack.num_experts, *shape)
        if kind not in (WEIGHT, LATE_GRADIENT):
            expected = optimizer.state_shape(kind, expected)
        found = tuple(values[name].shape) if name in values else None
        if found != expected:
            raise ValueError(f"{kind} of {stack.name}.{name}: expected the shape {expected}, found {found}")
    for slot in slots:
        first, end = slot.chunk.first_expert, slot.chunk.first_expert + slot.chunk.num_experts
        slot.write(kind, [values[name][first:end] for name in stack.matrices])


class OffloadRuntime:
    """Holds parameters, gradients and optimizer state of a model's experts, and streams them through a device.

    A step consists of ``hold`` around each use of a chunk in a forward pass, ``begin_backward`` and ``end_backward``
    around each use in a backward pass, ``sum_of_squares`` for the gradients' norm, and ``step`` or ``skip``. Losses,
    norms and weights are bit-identical for every budget, chunk size, plan and timing of copies.

    With ``update_in_backward`` no memory holds gradients, and nothing waits for the norm. A step begins with
    ``begin_step``, and each chunk is updated as soon as it has its gradient. Such a step can neither clip by the norm
    nor be skipped, and each chunk may get only one gradient.

    With ``next_weights`` each update is one step late. ``begin_delayed_update`` starts it at the begin of the next
    step. It overlaps with that whole step, which still reads the old weights. The new weights are published at the
    step's end. Between two steps the state is the state before the update, and the gradients are one more kind of
    values.

    Without a plan, as in the first step, a chunk is dropped after each use. With a plan, a use outside of the plan is
    uploaded on demand and counted in ``statistics``.

    Args:
        stacks: the layers' experts. A stack shared by several layers is given once.
        device: the accelerator.
        optimizer: the optimizer's settings.
        dtype: the type of the weights on the device, and of gradients when they are moved.
        gradient_dtype: the type in which gradients are accumulated; None: ``dtype``.
        chunk_bytes: the largest size of one upload, see ``cut``.
        num_threads: the number of host threads for updates.
        host_budget_bytes: the limit of ``host_bytes``; None: there is none.
        next_weights: where late updates put the new weights, since the step still reads the old ones. In the memory of
            the gradient they need no further memory, but each chunk may get only one gradient in a step. None: updates
            are not late.
        plan: the plan for the first step and later ones, if it is known. Chunks owned by the device then never take
            memory on the host.
        reduce: combines each gradient [N, ...] of the computation in place with the other ranks' gradients, also for
            chunks owned by the device. The calls follow the order of the backward pass, so it is the same on all ranks
            whatever their plans are.
        uses_at_once: the gradients of so many consecutive uses of a chunk are added up on the device and count as one.
            Unfinished sums are non-model memory.

    Attributes:
        trace: the trace of the last complete step.
        peaks: the peaks of memory at each of its moments.
        host_bytes: host memory of staging blocks and of all chunks not owned by the device.
        recorder: makes the traces.
        activations: moves activations of parts of the model to the host, if the model uses it.
        statistics: deviations from the plan.

    Raises:
        ValueError: the host's budget is too small, or the device's is too small for one window of chunks.
        DeviceOutOfMemory: the device's budget is too small for the chunks it has to own.
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        device: Device,
        optimizer: OptimizerSettings,
        *,
        dtype: torch.dtype,
        chunk_bytes: int,
        gradient_dtype: torch.dtype | None = None,
        num_threads: int = 1,
        host_budget_bytes: int | None = None,
        update_in_backward: bool = False,
        next_weights: NextWeights | None = None,
        plan: PlacementPlan | None = None,
        reduce: Callable[[Tensor], None] | None = None,
        uses_at_once: int = 1,
    ) -> None:
        self.device, self.optimizer, self.update_in_backward = device, optimizer, update_in_backward
        gradient_dtype = gradient_dtype or dtype
        stored = None if update_in_backward else gradient_dtype
        laid_out = lay_out(stacks, chunk_bytes, dtype, stored, optimizer, next_weights)
        self.sizes = sizes_of(laid_out)
        owned: frozenset[int] = plan.owned if plan is not None else frozenset()
        self.host_bytes = self._host_bytes(owned)
        if host_budget_bytes is not None and self.host_bytes > host_budget_bytes:
            raise ValueError(
                f"the host's budget of {in_mib(host_budget_bytes)} is too small: the experts need "
                f"{in_mib(self.host_bytes)}"
            )
        window = window_bytes(self.sizes, 0)
        if window > device.budget_bytes:
            raise ValueError(
                f"the device's budget of {in_mib(device.budget_bytes)} is too small; the smallest for one window of "
                f"chunks is {in_mib(window)}"
            )
        self._slots = [Slot(chunk, layout, device, chunk.number in owned) for chunk, layout in laid_out]
        self._stacks = {stack.name: [slot for slot in self._slots if slot.chunk.stack is stack] for stack in stacks}
        self._workers = HostWorkers(device, num_threads)
        largest = max(size.gradient for size in self.sizes)
        direct = gradient_dtype == dtype
        self._gradients = GradientOffload(device, self._workers, dtype, largest, direct, reduce, uses_at_once)
        self.statistics = Statistics()
        self._updates = Updates(device, self._workers, optimizer, self._slots, next_weights is not None)
        self.trace = Trace(())
        self.peaks: tuple[Peaks, ...] = ()
        self.recorder = StepRecorder(device, uses_at_once)
        self._weights = WeightCache(
            device, self._slots, self._workers, self._gradients, self.recorder, self.statistics, self._updates.late
        )
        if plan is not None:
            self._follow(plan)
        self.activations = ActivationOffload(device, partial(HostBlock, device=device))

    @property
    def stacks(self) -> list[str]:
        """The stacks' names."""
        return list(self._stacks)

    def chunks_of(self, stack: str) -> list[Chunk]:
        """Returns a stack's chunks."""
        return [slot.chunk for slot in self._stacks[stack]]

    def matrices_of(self, stack: str) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of one expert's parameters, see ``Stack``."""
        return self._stacks[stack][0].chunk.stack.matrices

    # Uses

    @contextmanager
    def hold(self, chunk: Chunk) -> Iterator[list[Tensor]]:
        """Keeps a chunk on the device inside ``with``; yields the weights [N, ...] of each parameter."""
        slot = self._slots[chunk.number]
        self._weights.pin(slot, backward=False)
        try:
            yield slot.device_weights()
        finally:
            self._weights.unpin(slot)

    def begin_backward(self, chunk: Chunk) -> None:
        """Begins a use in the backward pass: the views saved by autograd show the weights again."""
        self._weights.pin(self._slots[chunk.number], backward=True)

    def end_backward(self, chunk: Chunk, gradients: Sequence[Tensor]) -> None:
        """Ends the use begun by ``begin_backward`` and takes its gradients [N, ...], one for each parameter."""
        slot = self._slots[chunk.number]
        self._gradients.take(slot, gradients)
        self._weights.unpin(slot)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Marks uses inside ``with`` as being outside of any step; only between two steps."""
        self._weights.evaluating = True
        try:
            yield
        finally:
            self._weights.evaluating = False

    # The end of a step

    def begin_step(self, learning_rate: float, coefficient: float = 1.0) -> None:
        """Begins a step with ``update_in_backward``; the arguments are those of ``step``."""
        assert self.update_in_backward
        self.num_updates += 1
        number = self.num_updates

        def update(slot: Slot, gradients: Sequence[Tensor]) -> None:
            slot.update(self.optimizer, number, learning_rate, coefficient, gradients)

        self._gradients.update = update

    def take_gradients(self) -> list[Tensor]:
        """Moves the gradients out of all chunks, for a caller with several backward passes to add up.

        Returns:
            fp32 [N, ...] on the host, for each chunk and each of its parameters; zeros where there is no gradient.
        """
        return self._gradients.move_out(self._slots)

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Gives all chunks the gradients of a step, in the order of ``take_gradients``."""
        self._gradients.move_in(self._slots, gradients)

    def sum_of_squares(self) -> float:
        """Returns the sum of squares of this rank's gradients in the step; infinite if one of them is not finite."""
        return self._gradients.sum_of_squares(self._slots)

    def step(self, learning_rate: float, coefficient: float = 1.0) -> None:
        """Updates all chunks with gradients.

        Host threads update the chunks on the host, in the order in which the next step reads or replaces their values.
        The call does not wait for them.

        Args:
            learning_rate: of this step.
            coefficient: the factor of the gradients: 1 / loss scale, times the factor of clipping.
        """
        assert not self.update_in_backward
        self._updates.update(self._end_step(), learning_rate, coefficient)

    def begin_delayed_update(self) -> None:
        """Begins the update of the last step, if it is late; call it at the begin of each step."""
        self._updates.begin_step()

    def use_delayed_gradients(self) -> None:
        """Applies the late update, if there is one, without a further step. Call it only between two steps."""
        self._updates.begin_step()
        self._updates.publish()

    @property
    def delayed_update(self) -> DelayedUpdate | None:
        """The update to apply in the next step. To restore one: assign this, then ``write`` the gradients."""
        return self._updates.waiting

    @delayed_update.setter
    def delayed_update(self, update: DelayedUpdate) -> None:
        self._updates.wait_with(self._slots, update)

    def skip(self) -> None:
        """Ends the step without an update, for example if a gradient is not finite.

        With ``update_in_backward`` it ends every step, since the chunks have been updated already.
        """
        self._end_step()

    def _end_step(self) -> list[Slot]:
        """Drops all weights, ends the trace, and returns the chunks with gradients in the order of their updates.

        The order is that of the next uses. Without delay, updates must end before the next forward pass uses the
        chunks. Late updates must end before the next backward pass brings new gradients.
        """
        self._weights.end_step()
        self._gradients.end_step()
        self._updates.publish()
        recorded = self.recorder.finish()
        if recorded is not None:
            self.trace, self.peaks = recorded
        first_use = self.trace.first_uses(backward=self._updates.late)
        with_gradients = sorted(
            (slot for slot in self._slots if slot.num_gradients), key=lambda slot: first_use[slot.number]
        )
        for slot in with_gradients:
            slot.num_gradients, slot.squares_job = 0, None
        return with_gradients

    def drain(self) -> None:
        """Waits until all updates are done. Call it before the state is read, moved or saved.

        Raises:
            WorkerFailure: one of them failed.
        """
        for slot in self._slots:
            self._workers.wait(slot.job)
            if slot.uploaded is not None:
                self.device.host_waits(slot.uploaded)

    def close(self) -> None:
        """Ends the threads and frees all memory, and with it the state."""
        self._workers.close()
        self._gradients.close()
        self.activations.close()
        for slot in self._slots:
            slot.free(self.device)

    # Placement and state, between two steps

    @property
    def num_updates(self) -> int:
        """The number of begun updates; Adam's bias correction and Adafactor's decay depend on it."""
        return self._updates.number

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._updates.number = number

    def adopt(self, plan: PlacementPlan) -> None:
        """Moves chunks to where ``plan`` puts them and follows it from the next step on.

        Raises:
            DeviceOutOfMemory: the device's budget is too small for the chunks it has to own.
        """
        self.drain()
        # First make room: chunks leave the device before others come.
        for slot in self._slots:
            if slot.owned and slot.number not in plan.owned:
                slot.move(HostBlock(slot.layout.num_bytes, self.device), self.device)
        for slot in self._slots:
            if not slot.owned and slot.number in plan.owned:
                buffer = self.device.buffer(slot.layout.num_bytes)
                self.device.acquire(buffer)
                slot.move(buffer, self.device)
        self._follow(plan)

    @property
    def plan(self) -> PlacementPlan | None:
        """The current plan; None before the first one."""
        return self._weights.plan

    def _follow(self, plan: PlacementPlan) -> None:
        self.host_bytes = self._host_bytes(plan.owned)
        self._weights.follow(plan)
        self._gradients.expected = plan.trace.gradients_per_chunk()

    def _host_bytes(self, owned: frozenset[int]) -> int:
        return staging_bytes(self.sizes) + sum(s.owned for number, s in enumerate(self.sizes) if number not in owned)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of a parameter's values: ``WEIGHT``, the optimizer's states, and ``LATE_GRADIENT`` if it waits."""
        waiting = () if self.delayed_update is None else (LATE_GRADIENT,)
        return (WEIGHT, *self._slots[0].layout.state_names, *waiting)

    def read(self, kind: str, stack: str) -> dict[str, Tensor]:
        """Returns the fp32 values of a stack on the host, by the names of its parameters.

        Args:
            kind: one of ``kinds``.
            stack: the stack's name.

        Returns:
            Parameter name -> [experts, rows, columns], or the shape of the optimizer's state.
        """
        self.drain()
        return read_values(self._stacks[stack], kind)

    def write(self, kind: str, stack: str, values: dict[str, Tensor]) -> None:
        """Sets values, named and shaped as those from ``read``.

        Raises:
            ValueError: a parameter is missing or has another shape.
        """
        self.drain()
        write_values(self._stacks[stack], kind, values, self.optimizer)
