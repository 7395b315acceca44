"""The runtime: streams chunks to the device, moves gradients to the host, and updates chunks there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from offload.devices.device import Device, Peaks
from offload.memory.chunks import Chunk, Stack
from offload.memory.host_memory import HostBlock
from offload.memory.layout import lay_out, plane_values
from offload.optimizer.settings import OptimizerSettings
from offload.plan.placement import PlacementPlan
from offload.plan.sizes import in_mib, sizes_of, staging_bytes, window_bytes
from offload.plan.trace import Trace
from offload.runtime.activations import ActivationOffload
from offload.runtime.cursor import Statistics
from offload.runtime.gradients import GradientOffload
from offload.runtime.recorder import StepRecorder
from offload.runtime.slots import WEIGHT, Slot
from offload.runtime.weight_cache import WeightCache
from offload.runtime.workers import HostWorkers


class OffloadRuntime:
    """Holds parameters, gradients and optimizer state of a model's experts, and streams them through a device.

    A step consists of ``hold`` around each use of a chunk in a forward pass, ``begin_backward`` and ``end_backward``
    around each use in a backward pass, ``sum_of_squares`` for the gradients' norm, and ``step`` or ``skip``. Losses,
    norms and weights are equal to the bit for every budget, chunk size, plan and timing of copies.

    With ``update_in_backward`` no memory holds gradients, and nothing waits for the norm: a step begins with
    ``begin_step``, and each chunk is updated as soon as it has its gradient. Such a step can neither clip by the norm
    nor be skipped, and each chunk may get only one gradient.

    Without a plan, as in the first step, a chunk is dropped after each use. With a plan, a use that is not in it is
    uploaded on demand, and counted in ``statistics``.

    Args:
        stacks: the layers' experts. A stack that several layers share is given once.
        device: the accelerator.
        optimizer: the optimizer's settings.
        dtype: the type of the weights on the device, and of gradients when they are moved.
        gradient_dtype: the type in which gradients are accumulated; None: ``dtype``.
        chunk_bytes: the most that one upload moves, see ``cut``.
        num_threads: the number of host threads that update chunks.
        host_budget_bytes: the limit of ``host_bytes``; None: there is none.
        plan: the plan for the first step and later ones, if it is known. Chunks that the device owns then never take
            memory on the host.
        reduce: combines a gradient [N, ...] on the device in place with those of other ranks. It is called at every
            use, in the order of the backward pass, which is the same on all ranks whatever their plans are.

    Attributes:
        trace: the trace of the last complete step.
        peaks: the peaks of memory at each of its moments.
        num_updates: the number of updates so far, on which Adam's bias correction and Adafactor's decay depend.
        host_bytes: what the host holds: staging blocks, and the chunks that the device does not own.
        activations: moves activations of parts of the model to the host, if the model uses it.
        statistics: deviations from the plan.

    Raises:
        ValueError: the host's budget is too small, or the device's is too small for one window of chunks.
        DeviceOutOfMemory: the device's budget is too small for the chunks that it has to own.
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
        plan: PlacementPlan | None = None,
        reduce: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.device, self.optimizer, self.update_in_backward = device, optimizer, update_in_backward
        gradient_dtype = gradient_dtype or dtype
        laid_out = lay_out(stacks, chunk_bytes, dtype, None if update_in_backward else gradient_dtype, optimizer)
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
        self._gradients = GradientOffload(device, self._workers, dtype, largest, gradient_dtype == dtype, reduce)
        self.statistics = Statistics()
        self.num_updates = 0
        self.trace = Trace(())
        self.peaks: tuple[Peaks, ...] = ()
        self._recorder = StepRecorder(device)
        self._weights = WeightCache(
            device, self._slots, self._workers, self._gradients, self._recorder, self.statistics
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
        """Begins a use in the backward pass: the views that autograd has saved show the weights again."""
        self._weights.pin(self._slots[chunk.number], backward=True)

    def end_backward(self, chunk: Chunk, gradients: Sequence[Tensor]) -> None:
        """Ends the use that ``begin_backward`` began, and takes its gradients [N, ...], one for each parameter."""
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
        """Moves the gradients out of all chunks, for a caller that adds up those of several backward passes.

        Returns:
            fp32 [N, ...] on the host, for each chunk and each of its parameters; zeros where there is no gradient.
        """
        return self._gradients.move_out(self._slots)

    def put_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Gives all chunks the gradients of a step, in the order of ``take_gradients``."""
        self._gradients.move_in(self._slots, gradients)

    def sum_of_squares(self) -> float:
        """Returns the sum of squares of the step's gradients on this rank; infinite if one of them is not finite."""
        return self._gradients.sum_of_squares(self._slots)

    def step(self, learning_rate: float, coefficient: float = 1.0) -> None:
        """Updates all chunks that have gradients.

        Chunks on the host are updated by host threads, in the order in which the next forward pass will use them. The
        call does not wait for them.

        Args:
            learning_rate: of this step.
            coefficient: the factor of the gradients: 1 / loss scale, times the factor of clipping.
        """
        assert not self.update_in_backward
        self.num_updates += 1
        for slot in self._end_step():
            arguments = (self.optimizer, self.num_updates, learning_rate, coefficient)
            slot.version += 1  # replicas of the old weights must not be used from here on
            if slot.owned:
                self.device.computes_on(slot.device_memory, write=True)
                slot.update(*arguments, slot.gradients())
                continue

            def work(slot: Slot = slot, arguments: tuple[OptimizerSettings, int, float, float] = arguments) -> None:
                assert isinstance(slot.home, HostBlock)
                self.device.host_accesses(plane_values(slot.home, slot.layout.planes[WEIGHT]), write=True)
                self.device.host_accesses(plane_values(slot.home, slot.layout.planes["gradient"]), write=False)
                slot.update(*arguments, slot.gradients())

            # The update must not start before the last upload has read the old weights.
            slot.job = self._workers.submit(work, [slot.job], [slot.uploaded])

    def skip(self) -> None:
        """Ends the step without an update, for example if a gradient is not finite.

        With ``update_in_backward`` it ends every step, whose chunks have been updated already.
        """
        self._end_step()

    def _end_step(self) -> list[Slot]:
        """Drops all weights, ends the trace, and returns the chunks with gradients in the order of their first use."""
        self._weights.end_step()
        self._gradients.free()
        recorded = self._recorder.finish()
        if recorded is not None:
            self.trace, self.peaks = recorded
        first_use = {moment.chunk: time for time, moment in reversed(list(enumerate(self.trace.moments)))}
        with_gradients = sorted(
            (slot for slot in self._slots if slot.num_gradients), key=lambda slot: first_use[slot.number]
        )
        for slot in with_gradients:
            slot.num_gradients, slot.squares_job = 0, None
        return with_gradients

    def drain(self) -> None:
        """Waits until all updates are done. It has to be called before the state is read, moved or saved.

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

    def adopt(self, plan: PlacementPlan) -> None:
        """Moves chunks to the places of ``plan`` and follows it from the next step on.

        Raises:
            DeviceOutOfMemory: the device's budget is too small for the chunks that it has to own.
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
        """The plan that is followed."""
        return self._weights.plan

    def _follow(self, plan: PlacementPlan) -> None:
        self.host_bytes = self._host_bytes(plan.owned)
        self._weights.follow(plan)
        self._gradients.expected = plan.trace.gradients_per_chunk()

    def _host_bytes(self, owned: frozenset[int]) -> int:
        return staging_bytes(self.sizes) + sum(s.owned for number, s in enumerate(self.sizes) if number not in owned)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of a parameter's values: ``WEIGHT`` and the optimizer's states."""
        return (WEIGHT, *self._slots[0].layout.state_names)

    def read(self, kind: str, stack: str) -> dict[str, Tensor]:
        """Returns the fp32 values of a stack on the host, by the names of its parameters.

        Args:
            kind: one of ``kinds``.
            stack: the stack's name.

        Returns:
            Parameter name -> [experts, rows, columns], or the shape of the optimizer's state.
        """
        self.drain()
        pieces = [slot.read(kind) for slot in self._stacks[stack]]
        return {
            name: torch.cat(values)
            for name, values in zip(self.matrices_of(stack), zip(*pieces, strict=True), strict=True)
        }

    def write(self, kind: str, stack: str, values: dict[str, Tensor]) -> None:
        """Sets the values that ``read`` returns.

        Raises:
            ValueError: a parameter is missing or has another shape.
        """
        self.drain()
        slots = self._stacks[stack]
        matrices, num_experts = self.matrices_of(stack), slots[0].chunk.stack.num_experts
        for name, shape in matrices.items():
            expected: tuple[int, ...] = (num_experts, *shape)
            if kind != WEIGHT:
                expected = self.optimizer.states(expected)[kind]
            found = tuple(values[name].shape) if name in values else None
            if found != expected:
                raise ValueError(f"{kind} of {stack}.{name}: expected the shape {expected}, found {found}")
        for slot in slots:
            first, end = slot.chunk.first_expert, slot.chunk.first_expert + slot.chunk.num_experts
            slot.write(kind, [values[name][first:end] for name in matrices])
