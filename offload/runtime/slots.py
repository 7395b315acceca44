"""A chunk's memory on the host and on the device, and the operations on its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.devices.device import Buffer, Device, Event
from offload.memory.host_memory import HostBlock
from offload.memory.layout import Chunk, ChunkLayout, plane_tensors
from offload.optimizer.master_weights import read_master, write_master
from offload.optimizer.settings import OptimizerSettings
from offload.optimizer.update import sum_of_squares, update
from offload.runtime.workers import Job

WEIGHT = "weight"
LATE_GRADIENT = "late_gradient"
"""The gradients of a late update as a kind of values, see ``OffloadRuntime``."""


class Slot:
    """The memory of one chunk.

    The home has all values of the chunk and is the authoritative copy. The replica is a copy of the weights on the
    device. It exists only around uses.

    If the layout has a ``next_weight`` plane, an update writes there, and uses read the old weights until ``publish``
    exchanges the two planes. If the gradient's plane serves as ``next_weight``, the next gradient goes to the plane of
    the old weights.

    Attributes:
        planes: where the values are now, see ``ChunkLayout``.
        home: host memory, or a buffer of the device if it owns the chunk.
        replica: a buffer of the device; if it is present, it has or is about to get the weights of ``replica_version``.
        ready: an upload for which the computation has not waited yet.
        uploaded: the last upload from the home's weights.
        job: the last host job on the home.
        pins: the number of uses at this time; the replica stays while there is one.
        last_use: the plan's moment of the last use.
        num_gradients: the number of gradients received in this step.
        waits: the gradient is the last step's, and its update has not begun.
        order: the chunk's position in the order of late updates.
        unpublished: an update of this step has written the next weights, or is about to.
        squares: the sum of squares of each matrix of the gradient, computed by ``squares_job``.
        version: how often the home's weights have changed; a replica of an older version must not be used.
    """

    def __init__(self, chunk: Chunk, layout: ChunkLayout, device: Device, owned: bool) -> None:
        self.chunk, self.layout, self.number = chunk, layout, chunk.number
        self.planes = dict(layout.planes)
        weight = self.planes[WEIGHT]
        self.home: HostBlock | Buffer
        if owned:
            self.home = device.buffer(layout.num_bytes)
            device.acquire(self.home)
            device.computes_on(self.home, write=True)
            self.home.view(torch.uint8, 0, (layout.num_bytes,)).zero_()  # as host memory is: states start at 0
        else:
            self.home = HostBlock(layout.num_bytes, device)
        self.replica = device.buffer(weight.numel * weight.dtype.itemsize)
        self.ready: Event | None = None
        self.uploaded: Event | None = None
        self.job: Job | None = None
        self.pins = 0
        self.last_use = -1
        self.num_gradients = 0
        self.waits = self.unpublished = False
        self.order = 0
        self.squares: list[float] = []
        self.squares_job: Job | None = None
        self.version = self.replica_version = 0

    @property
    def owned(self) -> bool:
        """Whether the device owns the chunk."""
        return isinstance(self.home, Buffer)

    @property
    def rotates(self) -> bool:
        """Whether weights and gradients exchange their planes after each update."""
        return "next_weight" in self.planes and self.planes["next_weight"] is self.planes["gradient"]

    @property
    def device_memory(self) -> Buffer:
        """The buffer from which the computation reads the weights."""
        return self.home if isinstance(self.home, Buffer) else self.replica

    def device_weights(self) -> list[Tensor]:
        """Returns the weights [N, ...] of each parameter."""
        plane = self.planes[WEIGHT]
        return list(plane_tensors(self.device_memory, plane, None if self.owned else plane.dtype))

    def gradients(self) -> list[Tensor]:
        """Returns the gradients [N, ...] of each parameter in the home."""
        return list(plane_tensors(self.home, self.planes["gradient"]))

    def measure(self, gradients: Sequence[Tensor]) -> None:
        """Computes the sum of squares of each matrix by itself, so no sum depends on the size of the chunk."""
        matrices = [matrix for stack in gradients for matrix in stack]
        if matrices[0].device.type == "cpu":
            self.squares = [sum_of_squares(matrix) for matrix in matrices]
        else:  # the host waits for the device once
            self.squares = torch.stack([matrix.double().square().sum() for matrix in matrices]).tolist()

    def update(
        self,
        settings: OptimizerSettings,
        step: int,
        learning_rate: float,
        coefficient: float,
        gradients: Sequence[Tensor],
    ) -> None:
        """Applies one step of the optimizer to the home; for the arguments see ``offload.optimizer.update``."""
        states = {name: list(plane_tensors(self.home, self.planes[name])) for name in self.layout.state_names}
        targets = list(plane_tensors(self.home, self.planes.get("next_weight", self.planes[WEIGHT])))
        stack = self.chunk.stack
        for index, (name, (weight, remainder), gradient) in enumerate(
            zip(stack.matrices, self._masters(), gradients, strict=True)
        ):
            parts = stack.parts.get(name, 1) if settings.kind == "muon" else 1
            own = {state: _divided(values[index], parts) for state, values in states.items()}
            tensors = (_divided(each, parts) for each in (weight, gradient, targets[index]))
            weight, gradient, target = tensors
            remainder = None if remainder is None else _divided(remainder, parts)
            update(settings, step, learning_rate, coefficient, weight, remainder, gradient, own, target)

    def publish(self) -> None:
        """Replaces the weights by the next weights. The update must be done."""
        self.version += 1
        self.unpublished = False
        old, new = self.planes[WEIGHT], self.planes["next_weight"]
        if self.rotates:
            self.planes["gradient"] = old
        self.planes[WEIGHT], self.planes["next_weight"] = new, old

    @torch.no_grad()
    def read(self, kind: str) -> list[Tensor]:
        """Returns the fp32 values of each parameter, copied to the host.

        Args:
            kind: ``WEIGHT``, ``LATE_GRADIENT`` or the name of an optimizer state.
        """
        if kind == LATE_GRADIENT:
            found = self.gradients()
            return [
                part.to("cpu", torch.float32, copy=True) if self.waits else torch.zeros(part.shape) for part in found
            ]
        if kind != WEIGHT:
            return [part.to("cpu", copy=True) for part in plane_tensors(self.home, self.planes[kind])]
        return [read_master(weight, remainder).to("cpu", copy=True) for weight, remainder in self._masters()]

    @torch.no_grad()
    def write(self, kind: str, values: Sequence[Tensor]) -> None:
        """Sets values, in the form returned by ``read``."""
        if kind != WEIGHT:
            plane = self.planes["gradient" if kind == LATE_GRADIENT else kind]
            for part, value in zip(plane_tensors(self.home, plane), values, strict=True):
                part.copy_(value)
            return
        self.version += 1
        for (weight, remainder), value in zip(self._masters(), values, strict=True):
            write_master(value.to(weight.device, torch.float32), weight, remainder)

    def _masters(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yields the weight and the remainder of each parameter."""
        planes = self.planes
        weights = list(plane_tensors(self.home, planes[WEIGHT]))
        remainders = (
            list(plane_tensors(self.home, planes["remainder"])) if "remainder" in planes else [None] * len(weights)
        )
        yield from zip(weights, remainders, strict=True)

    def free(self, device: Device) -> None:
        """Frees all memory. No copy or job may still use it."""
        if self.replica.present:
            device.release(self.replica)
        if isinstance(self.home, HostBlock):
            self.home.free()
        elif self.home.present:
            device.release(self.home)

    def move(self, home: HostBlock | Buffer, device: Device) -> None:
        """Copies all values to another home, waits for the copy, and frees the old home."""
        source = self.home.view(torch.uint8, 0, (self.layout.num_bytes,))
        target = home.view(torch.uint8, 0, (self.layout.num_bytes,))
        # The copy must follow all writes to the old home and all uses of the new home's memory.
        now = [device.compute_event()]
        if isinstance(home, Buffer):
            event = device.upload(source, target, home, now)
        else:
            assert isinstance(self.home, Buffer)
            event = device.download(source, target, self.home, now)
        device.compute_waits(event)
        device.host_waits(event)
        if isinstance(self.home, Buffer):
            device.release(self.home)
        else:
            self.home.free()
        self.home, self.job, self.uploaded = home, None, None


def _divided(stack: Tensor, parts: int) -> Tensor:
    """Returns matrices [N, rows, columns] as [N * parts, rows / parts, columns]; other stacks as they are."""
    return stack if parts == 1 or stack.dim() == 2 else stack.view(-1, stack.shape[1] // parts, stack.shape[2])


def accumulate(totals: Sequence[Tensor], gradients: Sequence[Tensor], more: bool) -> None:
    """Adds gradients to the totals, or replaces the totals unless ``more``."""
    for total, gradient in zip(totals, gradients, strict=True):
        if more:
            total.add_(gradient)
        else:
            total.copy_(gradient)
