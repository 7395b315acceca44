"""Brings chunks to the device in time, takes their gradients away, and updates them on the host meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from offload.activations import ActivationOffload
from offload.chunks import Chunk, Stack, flat, lay_out
from offload.device import Device, Peaks
from offload.follower import Statistics
from offload.gradients import GradientPath
from offload.host_memory import HostBlock
from offload.plan import Plan
from offload.recorder import StepRecorder
from offload.replicas import Replicas
from offload.sizes import sizes_of, staging_bytes, window_bytes
from offload.slots import WEIGHT, Slot
from offload.trace import Trace
from offload.update import OptimizerSettings
from offload.worker import HostWorkers


class OffloadRuntime:
    """Holds the experts of a model under a byte budget: parameters, gradients and optimizer state.

    A step is: ``hold`` and ``begin_backward`` / ``end_backward`` around every use of a chunk, in any order;
    ``sum_of_squares`` for the gradients' norm; ``step``, or ``skip``. Where the chunks lie changes no result: losses,
    norms and weights are equal to the bit for every budget, chunk size, plan and delay of copies.

    With ``update_in_backward`` nothing waits for the norm: ``begin_step`` comes first, each chunk is updated as soon
    as its gradient is there, and no memory holds gradients. Then a step can neither clip by the norm nor be skipped,
    and brings each chunk one gradient.

    Without a plan (the first step, which is traced) a chunk is dropped as soon as it is not in use. A use that the
    plan does not foresee is fetched when it comes, and counted.

    Args:
        stacks: the layers' experts; a stack that several layers use is given once.
        dtype: of the weights on the device, and of gradients when they move.
        gradient_dtype: in which gradients add up over micro-batches and uses; None: ``dtype``.
        chunk_bytes: the most that one upload moves, see ``cut``.
        num_threads: of the host that update chunks.
        host_budget_bytes: None for no limit.
        plan: what to follow from the first step on, where it is known; chunks that the device owns then never lie on
            the host.
        reduce: combines a gradient [N, ...] in place with those of other ranks, on the device, at every use;
            called in the order of the backward pass, the same on all ranks whatever their plans.

    Attributes:
        trace: the last complete step's.
        peaks: of each of its moments.
        num_updates: Adam's bias correction and Adafactor's decay depend on it.
        host_bytes: what the chunks need on the host that the device does not own, staging blocks included.
        activations: takes those of parts of the model to the host, where the model asks it to.

    Raises:
        ValueError: the host's budget is too small, or the device's does not hold one window of chunks.
        DeviceOutOfMemory: the device does not hold what the plan wants it to own.
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
        plan: Plan | None = None,
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
                f"the host's budget of {host_budget_bytes} bytes is too small: the experts need {self.host_bytes}"
            )
        window = window_bytes(self.sizes, 0)
        if window > device.budget_bytes:
            raise ValueError(
                f"the device's budget of {device.budget_bytes} bytes is too small; the smallest for one window of "
                f"chunks is {window}"
            )
        self._slots = [Slot(chunk, layout, device, chunk.number in owned) for chunk, layout in laid_out]
        self._stacks = {stack.name: [slot for slot in self._slots if slot.chunk.stack is stack] for stack in stacks}
        self._workers = HostWorkers(device, num_threads)
        largest = max(size.gradient for size in self.sizes)
        self._gradients = GradientPath(device, self._workers, dtype, largest, gradient_dtype == dtype, reduce)
        self.statistics = Statistics()
        self.num_updates = 0
        self.trace = Trace(())
        self.peaks: tuple[Peaks, ...] = ()
        self._recorder = StepRecorder(device)
        self._replicas = Replicas(device, self._slots, self._workers, self._gradients, self._recorder, self.statistics)
        if plan is not None:
            self._follow(plan)
        self.activations = ActivationOffload(device, partial(HostBlock, device=device))

    @property
    def stacks(self) -> list[str]:
        """Names."""
        return list(self._stacks)

    def chunks_of(self, stack: str) -> list[Chunk]:
        return [slot.chunk for slot in self._stacks[stack]]

    def matrices_of(self, stack: str) -> dict[str, tuple[int, ...]]:
        return self._stacks[stack][0].chunk.stack.matrices

    # Uses

    @contextmanager
    def hold(self, chunk: Chunk) -> Iterator[list[Tensor]]:
        """Keeps a chunk on the device for a computation; gives its weights, one [N, ...] a parameter."""
        slot = self._slots[chunk.number]
        self._replicas.pin(slot, backward=False)
        try:
            yield slot.device_weights()
        finally:
            self._replicas.unpin(slot)

    def begin_backward(self, chunk: Chunk) -> None:
        """Brings the chunk's weights back into the memory that autograd has saved views of."""
        self._replicas.pin(self._slots[chunk.number], backward=True)

    def end_backward(self, chunk: Chunk, gradients: Sequence[Tensor]) -> None:
        """Takes over the gradients of a use that ``begin_backward`` opened."""
        slot = self._slots[chunk.number]
        self._gradients.take(slot, gradients)
        self._replicas.unpin(slot)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Between two steps: uses inside belong to no step."""
        self._replicas.evaluating = True
        try:
            yield
        finally:
            self._replicas.evaluating = False

    # The end of a step

    def begin_step(self, learning_rate: float, coefficient: float = 1.0) -> None:
        """With ``update_in_backward``: what ``step`` would be told."""
        assert self.update_in_backward
        self.num_updates += 1
        number = self.num_updates

        def update(slot: Slot, gradients: Sequence[Tensor]) -> None:
            slot.update(self.optimizer, number, learning_rate, coefficient, gradients)

        self._gradients.update = update

    def sum_of_squares(self) -> float:
        """Of all gradients of the step on this rank; infinite where one of them is not finite."""
        return self._gradients.sum_of_squares(self._slots)

    def step(self, learning_rate: float, coefficient: float = 1.0) -> None:
        """Updates all chunks that got gradients; those of the host one after the other, during the next forward pass.

        Args:
            coefficient: multiplies the gradients: one over the loss scale, times what clipping makes of them.
        """
        assert not self.update_in_backward
        self.num_updates += 1
        for slot in self._end_step():
            arguments = (self.optimizer, self.num_updates, learning_rate, coefficient)
            slot.version += 1
            if slot.owned:
                self.device.computes_on(slot.device_memory, write=True)
                slot.update(*arguments, slot.gradients())
                continue

            def work(slot: Slot = slot, arguments: tuple[OptimizerSettings, int, float, float] = arguments) -> None:
                assert isinstance(slot.home, HostBlock)
                self.device.host_accesses(flat(slot.home, slot.layout.planes[WEIGHT]), write=True)
                self.device.host_accesses(flat(slot.home, slot.layout.planes["gradient"]), write=False)
                slot.update(*arguments, slot.gradients())

            # Not before the last upload has read the old weights.
            slot.job = self._workers.submit(work, [slot.job], [slot.uploaded])

    def skip(self) -> None:
        """Ends the step without an update, as when the gradients are not finite; with ``update_in_backward`` after
        it."""
        self._end_step()

    def _end_step(self) -> list[Slot]:
        """Empties the device of replicas and closes the trace; returns the chunks with gradients, in order of use."""
        self._replicas.end_step()
        self._gradients.free()
        recorded = self._recorder.finish()
        if recorded is not None:
            self.trace, self.peaks = recorded
        first_use = {moment.chunk: time for time, moment in reversed(list(enumerate(self.trace.moments)))}
        came = sorted((slot for slot in self._slots if slot.arrivals), key=lambda slot: first_use[slot.number])
        for slot in came:
            slot.arrivals, slot.squares_job = 0, None
        return came

    def drain(self) -> None:
        """Returns when all updates are done: before anything else reads, moves or saves the state.

        Raises:
            WorkerFailure: one of them failed.
        """
        for slot in self._slots:
            self._workers.wait(slot.job)
            if slot.uploaded is not None:
                self.device.host_waits(slot.uploaded)

    def close(self) -> None:
        """Ends the threads and gives all memory back. What is needed of the state was read before."""
        self._workers.close()
        self._gradients.close()
        self.activations.close()
        for slot in self._slots:
            slot.free(self.device)

    # Placement and state, between two steps

    def adopt(self, plan: Plan) -> None:
        """Follows ``plan`` from the next step on.

        Raises:
            DeviceOutOfMemory: the device does not hold what the plan wants it to own.
        """
        self.drain()
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
    def plan(self) -> Plan | None:
        """What is followed."""
        return self._replicas.plan

    def _follow(self, plan: Plan) -> None:
        self.host_bytes = self._host_bytes(plan.owned)
        self._replicas.follow(plan)
        self._gradients.expected = plan.trace.gradient_arrivals()

    def _host_bytes(self, owned: frozenset[int]) -> int:
        return staging_bytes(self.sizes) + sum(s.owned for number, s in enumerate(self.sizes) if number not in owned)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of a parameter's values: its weight and the optimizer's states."""
        return (WEIGHT, *self._slots[0].layout.state_names)

    def read(self, kind: str, stack: str) -> dict[str, Tensor]:
        """The fp32 values of a stack on the host: parameter name -> [experts, rows, columns] or a state's shape."""
        self.drain()
        pieces = [slot.read(kind) for slot in self._stacks[stack]]
        return {
            name: torch.cat(values)
            for name, values in zip(self.matrices_of(stack), zip(*pieces, strict=True), strict=True)
        }

    def write(self, kind: str, stack: str, values: dict[str, Tensor]) -> None:
        """Sets what ``read`` gives.

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
