"""A chunk's places in memory, and what is done to the values there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.chunks import Chunk, Layout, parts
from offload.device import Buffer, Device, Event
from offload.host_memory import HostBlock
from offload.update import OptimizerSettings, read_master, sum_of_squares, update, write_master
from offload.worker import Job

WEIGHT = "weight"


class Slot:
    """The one authoritative copy of a chunk, its home, and the replica of its weights while the device uses them.

    Attributes:
        home: on the host, or on the device where that owns the chunk.
        replica: on the device; absent, on its way or ready, and then of version ``replica_version``.
        ready: the upload that the computation has not waited for yet.
        uploaded: the last upload, which read the home's weights.
        job: the host's last work on the home.
        pins: uses that are open; while there is one, the replica stays.
        last_use: the number of the last use in the plan's step.
        arrivals: gradients that came in this step.
        squares: per matrix of the gradient; ``squares_job`` made them.
        version: counts changes of the home's weights.
    """

    def __init__(self, chunk: Chunk, layout: Layout, device: Device, owned: bool) -> None:
        self.chunk, self.layout, self.number = chunk, layout, chunk.number
        weight = layout.planes[WEIGHT]
        self.home: HostBlock | Buffer
        if owned:
            self.home = device.buffer(layout.num_bytes)
            device.acquire(self.home)
            device.computes_on(self.home, write=True)
            self.home.view(torch.uint8, 0, (layout.num_bytes,)).zero_()
        else:
            self.home = HostBlock(layout.num_bytes, device)
        self.replica = device.buffer(weight.numel * weight.dtype.itemsize)
        self.ready: Event | None = None
        self.uploaded: Event | None = None
        self.job: Job | None = None
        self.pins = 0
        self.last_use = -1
        self.arrivals = 0
        self.squares: list[float] = []
        self.squares_job: Job | None = None
        self.version = self.replica_version = 0

    @property
    def owned(self) -> bool:
        """Whether the device owns the chunk."""
        return isinstance(self.home, Buffer)

    @property
    def device_memory(self) -> Buffer:
        """Where the computation finds the weights."""
        return self.home if isinstance(self.home, Buffer) else self.replica

    def device_weights(self) -> list[Tensor]:
        """[N, ...] per parameter; weights come first in either memory."""
        return list(parts(self.device_memory, self.layout.planes[WEIGHT]))

    def gradients(self) -> list[Tensor]:
        return list(parts(self.home, self.layout.planes["gradient"]))

    def measure(self, gradients: Sequence[Tensor]) -> None:
        """Per matrix, so that no sum depends on how many share a chunk."""
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
        states = {name: list(parts(self.home, self.layout.planes[name])) for name in self.layout.state_names}
        for index, ((weight, rest), gradient) in enumerate(zip(self._masters(), gradients, strict=True)):
            own = {name: values[index] for name, values in states.items()}
            update(settings, step, learning_rate, coefficient, weight, rest, gradient, own)

    @torch.no_grad()
    def read(self, kind: str) -> list[Tensor]:
        """The fp32 values per parameter, copied to the host."""
        if kind != WEIGHT:
            return [part.to("cpu", copy=True) for part in parts(self.home, self.layout.planes[kind])]
        return [read_master(weight, rest).to("cpu", copy=True) for weight, rest in self._masters()]

    @torch.no_grad()
    def write(self, kind: str, values: Sequence[Tensor]) -> None:
        """Sets what ``read`` gives."""
        self.version += 1
        if kind != WEIGHT:
            for part, value in zip(parts(self.home, self.layout.planes[kind]), values, strict=True):
                part.copy_(value)
            return
        for (weight, rest), value in zip(self._masters(), values, strict=True):
            write_master(value.to(weight.device, torch.float32), weight, rest)

    def _masters(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        planes = self.layout.planes
        weights = list(parts(self.home, planes[WEIGHT]))
        rests = list(parts(self.home, planes["rest"])) if "rest" in planes else [None] * len(weights)
        yield from zip(weights, rests, strict=True)

    def free(self, device: Device) -> None:
        """Gives all memory back, whatever uses it."""
        if self.replica.present:
            device.release(self.replica)
        if isinstance(self.home, HostBlock):
            self.home.free()
        elif self.home.present:
            device.release(self.home)

    def move(self, home: HostBlock | Buffer, device: Device) -> None:
        """Carries everything to another home; returns when it is there."""
        source = self.home.view(torch.uint8, 0, (self.layout.num_bytes,))
        target = home.view(torch.uint8, 0, (self.layout.num_bytes,))
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


def accumulate(totals: Sequence[Tensor], gradients: Sequence[Tensor], more: bool) -> None:
    """Adds to what is there, or replaces it."""
    for total, gradient in zip(totals, gradients, strict=True):
        if more:
            total.add_(gradient)
        else:
            total.copy_(gradient)
