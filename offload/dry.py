"""The dry trace: a step's uses of chunks and the tide of everything else, before any memory is taken.

To be run on tensors without memory (PyTorch's fake tensors), with something that counts what they would occupy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.activations import ActivationOffload
from offload.chunks import Chunk, Stack, cut
from offload.device import Event, Peaks
from offload.meter import Meter
from offload.recorder import StepRecorder
from offload.trace import Trace


class DryRuntime:
    """In place of an ``OffloadRuntime``: moves nothing and records the step.

    Args:
        meter: counts the bytes of tensors that are made; those of this object's weights it may count, too.
        constant_bytes: of what the meter does not see and the device will hold all the time.

    Attributes:
        activations: those that are to go to the host are dropped and made anew; it counts what would move.
    """

    def __init__(
        self, stacks: Sequence[Stack], dtype: torch.dtype, chunk_bytes: int, meter: Meter, constant_bytes: int = 0
    ) -> None:
        self._chunks = cut(stacks, chunk_bytes, dtype)
        before = meter.total
        self._weights = [[torch.empty(shape, dtype=dtype) for shape in chunk.shapes] for chunk in self._chunks]
        storages = {weight.untyped_storage()._cdata for weights in self._weights for weight in weights}
        self.activations = ActivationOffload(_Nowhere(storages), _NoBlock)
        self._pinned: list[int] = []
        self._recorder = StepRecorder(_Gauge(meter, constant_bytes - (meter.total - before)))

    def chunks_of(self, stack: str) -> list[Chunk]:
        return [chunk for chunk in self._chunks if chunk.stack.name == stack]

    @contextmanager
    def hold(self, chunk: Chunk) -> Iterator[list[Tensor]]:
        self._arrive(chunk, backward=False)
        try:
            yield [weight.detach() for weight in self._weights[chunk.number]]
        finally:
            self._pinned.remove(chunk.number)

    def begin_backward(self, chunk: Chunk) -> None:
        self._arrive(chunk, backward=True)

    def end_backward(self, chunk: Chunk, gradients: Sequence[Tensor]) -> None:
        self._pinned.remove(chunk.number)

    def _arrive(self, chunk: Chunk, backward: bool) -> None:
        pinned = tuple(sorted({number for number in self._pinned if number != chunk.number}))
        self._recorder.arrive(chunk.number, backward, pinned)
        self._recorder.start()
        self._pinned.append(chunk.number)

    def trace(self) -> Trace:
        """Of what was recorded."""
        recorded = self._recorder.finish()
        if recorded is None:
            raise RuntimeError("no chunk was used")
        return recorded[0]


class _Gauge:
    """Time does not pass where nothing is computed."""

    def __init__(self, meter: Meter, constant_bytes: int) -> None:
        self._meter, self._constant_bytes = meter, constant_bytes

    def begin_moment(self, number: int) -> Peaks:
        peak = self._meter.take_peak() + self._constant_bytes
        return Peaks(peak, peak)

    def mark(self) -> float:
        return 0.0

    def seconds_between(self, begin: float, end: float) -> float:
        return end - begin


class _Nowhere:
    """A device for activations whose copies are none."""

    def __init__(self, storages: set[int]) -> None:
        self.storages = storages

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def upload(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> None: ...

    def download(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> None: ...

    def compute_event(self) -> None: ...

    def compute_waits(self, event: Event) -> None: ...

    def computes_on(self, memory: Tensor, write: bool) -> None: ...


class _NoBlock:
    def __init__(self, num_bytes: int) -> None: ...

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor:
        return torch.empty(0)

    def free(self) -> None: ...
