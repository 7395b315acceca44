"""The dry run: records a step's uses of chunks and its non-model memory before any memory is allocated.

The model's code runs on PyTorch's fake tensors, and a meter counts the bytes of real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.devices.device import Event, Peaks
from offload.devices.meter import Meter
from offload.memory.layout import Chunk, Stack, cut
from offload.plan.trace import Trace
from offload.runtime.activations import ActivationOffload
from offload.runtime.gradient_sums import GradientSums
from offload.runtime.recorder import StepRecorder


class DryRuntime:
    """Replaces an ``OffloadRuntime`` in a dry run: it moves nothing and records the step.

    Args:
        stacks: the layers' experts.
        dtype: the type of the weights.
        chunk_bytes: see ``cut``.
        meter: counts the bytes of tensors. If it counts this object's weights too, they are subtracted.
        constant_bytes: bytes on the device all the time, unknown to the meter.
        uses_at_once: see ``OffloadRuntime``.

    Attributes:
        activations: drops activations instead of moving them to the host, makes new tensors when they are needed, and
            counts the bytes of the omitted copies.
    """

    def __init__(
        self,
        stacks: Sequence[Stack],
        dtype: torch.dtype,
        chunk_bytes: int,
        meter: Meter,
        constant_bytes: int = 0,
        uses_at_once: int = 1,
    ) -> None:
        self._chunks = cut(stacks, chunk_bytes, dtype)
        before = meter.total
        self._weights = [[torch.empty(shape, dtype=dtype) for shape in chunk.shapes] for chunk in self._chunks]
        storages = {weight.untyped_storage()._cdata for weights in self._weights for weight in weights}
        self.activations = ActivationOffload(_NullDevice(storages), _NullBlock)
        self._pinned: list[int] = []
        self._sums = GradientSums(uses_at_once)
        self._recorder = StepRecorder(_DryProbe(meter, constant_bytes - (meter.total - before)), uses_at_once)

    def chunks_of(self, stack: str) -> list[Chunk]:
        """Returns a stack's chunks."""
        return [chunk for chunk in self._chunks if chunk.stack.name == stack]

    @contextmanager
    def hold(self, chunk: Chunk) -> Iterator[list[Tensor]]:
        """Records a use in the forward pass; yields the chunk's weights."""
        self._arrive(chunk, backward=False)
        try:
            yield [weight.detach() for weight in self._weights[chunk.number]]
        finally:
            self._pinned.remove(chunk.number)

    def begin_backward(self, chunk: Chunk) -> None:
        """Records a use in the backward pass."""
        self._arrive(chunk, backward=True)

    def end_backward(self, chunk: Chunk, gradients: Sequence[Tensor]) -> None:
        """Ends the use in the backward pass."""
        self._sums.add(chunk.number, gradients)
        self._pinned.remove(chunk.number)

    def _arrive(self, chunk: Chunk, backward: bool) -> None:
        pinned = tuple(sorted({number for number in self._pinned if number != chunk.number}))
        self._recorder.arrive(chunk.number, backward, pinned)
        self._recorder.start()
        self._pinned.append(chunk.number)

    def trace(self) -> Trace:
        """Returns the recorded trace.

        Raises:
            RuntimeError: no chunk was used.
        """
        recorded = self._recorder.finish()
        if recorded is None:
            raise RuntimeError("no chunk was used")
        return recorded[0]


class _DryProbe:
    """Takes memory from a meter, and measures no time."""

    def __init__(self, meter: Meter, constant_bytes: int) -> None:
        self._meter, self._constant_bytes = meter, constant_bytes

    def begin_moment(self, number: int) -> Peaks:
        peak = self._meter.take_peak() + self._constant_bytes
        return Peaks(peak, peak)

    def mark(self) -> float:
        return 0.0

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin


class _NullDevice:
    """A device without copies, for activations."""

    def __init__(self, storages: set[int]) -> None:
        self.storages = storages

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def upload(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> None: ...

    def download(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> None: ...

    def compute_event(self) -> None: ...

    def compute_waits(self, event: Event) -> None: ...

    def computes_on(self, memory: Tensor, write: bool) -> None: ...


class _NullBlock:
    """Host memory of no size, for activations."""

    def __init__(self, num_bytes: int) -> None: ...

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor:
        return torch.empty(0)

    def free(self) -> None: ...
