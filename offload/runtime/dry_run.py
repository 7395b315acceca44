"""The dry run: records a step's uses of chunks and its non-model memory before any memory is allocated.

The model's code runs on PyTorch's fake tensors, and a meter counts the bytes of real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offload.devices.device import Event, Peaks
from offload.devices.meter import Meter
from offload.memory.layout import Chunk, Stack, cut
from offload.plan.trace import Trace
from offload.runtime.activations import ActivationOffload
from offload.runtime.recorder import StepRecorder
from offload.runtime.updates import GradientSums


class _Use(NamedTuple):
    """A use of a chunk, as ``StepRecorder.arrive`` gets it."""

    chunk: int
    backward: bool
    pinned: tuple[int, ...]


class _Level(NamedTuple):
    """Memory at a time: the peak since the previous time, and the bytes that exist.

    In a ``DryPass`` bytes count from its begin.
    """

    peak: int
    total: int


@dataclass(frozen=True)
class DryPass:
    """What a part of a step did, so that it can be repeated.

    Attributes:
        uses: of chunks, in their order.
        levels: of memory at each use and at the end, less the bytes that existed at the begin.
    """

    uses: tuple[_Use, ...]
    levels: tuple[_Level, ...]


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
        self._probe = _DryProbe(meter, constant_bytes - (meter.total - before))
        self._recorder = StepRecorder(self._probe, uses_at_once)
        self._uses: list[_Use] = []

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
        self._record(_Use(chunk.number, backward, pinned))
        self._pinned.append(chunk.number)

    def _record(self, use: _Use) -> None:
        self._uses.append(use)
        self._recorder.arrive(*use)
        self._recorder.start()

    def record(self, part: Callable[[], None]) -> DryPass:
        """Runs a part of the step, and returns what it did."""
        self._probe.note()
        begin, num_uses, num_levels = self._probe.total, len(self._uses), len(self._probe.levels)
        part()
        self._probe.note()
        levels = [_Level(peak - begin, total - begin) for peak, total in self._probe.levels[num_levels:]]
        return DryPass(tuple(self._uses[num_uses:]), tuple(levels))

    def repeat(self, done: DryPass) -> None:
        """Records a part of the step again without running it. Its copies of activations are not counted again."""
        begin = self._probe.total
        for use, level in zip((*done.uses, None), done.levels, strict=True):
            self._probe.pretend(begin + level.peak, begin + level.total)
            if use is not None:
                self._record(use)

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
    """Takes memory from a meter, and measures no time.

    Attributes:
        levels: the memory at each note.
    """

    def __init__(self, meter: Meter, constant_bytes: int) -> None:
        self._meter = meter
        self._more_bytes = constant_bytes  # than the meter knows, also those of repeated passes
        self._peak = 0
        self.levels: list[_Level] = []

    @property
    def total(self) -> int:
        return self._meter.total + self._more_bytes

    def note(self) -> None:
        """Notes the memory, and its peak since the last note."""
        self.levels.append(_Level(self._meter.take_peak() + self._more_bytes, self.total))
        self._peak = max(self._peak, self.levels[-1].peak)

    def pretend(self, peak: int, total: int) -> None:
        """Memory rose to a peak, and now there are ``total`` bytes."""
        self._peak = max(self._peak, peak)
        self._more_bytes += total - self.total

    def begin_moment(self, number: int) -> Peaks:
        self.note()
        peak, self._peak = self._peak, 0
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
