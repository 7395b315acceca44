"""Activations that wait for their backward pass on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from offload.device import Event
from offload.host_memory import Arena, Block


class Mover(Protocol):
    """What is asked of a device; see there."""

    storages: set[int]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def upload(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> Event: ...

    def download(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> Event: ...

    def compute_event(self) -> Event: ...

    def compute_waits(self, event: Event) -> None: ...

    def computes_on(self, memory: Tensor, write: bool) -> None: ...


class ActivationOffload:
    """Takes what autograd saves in parts of a model to the host and brings it back before the backward pass needs it.

    A use of a part is a **unit**. Inside ``unit`` every storage that is saved goes down as soon as it is there, and
    it leaves the device when the next unit begins; so the last one's are still there when the backward pass comes.
    There, the first tensor of a unit that is asked for starts the uploads of the unit before it. Memory on the device
    is PyTorch's own and lives as long as autograd needs it, so that it counts as non-model memory: the traces, and
    with them the plan, see what is left of the tide.

    Storages move whole: what several operators or views save moves once, and comes back with the same strides. So
    results are equal to the bit. Parameters, weights of chunks, integers and masks (which layers share) and small
    storages stay. Around a checkpointed function of either kind a unit takes the function's inputs.

    Args:
        device: the accelerator.
        new_block: makes host memory of a size.

    Attributes:
        slab_bytes: host memory is taken by so much.
        small_bytes: storages below stay where they are: starting a copy costs as much as moving some 100 KiB.
        downloaded_bytes, uploaded_bytes: moved since the construction.
    """

    small_bytes = 2**16
    slab_bytes = 2**25

    def __init__(self, device: Mover, new_block: Callable[[int], Block]) -> None:
        self.device = device
        self.arena = Arena(new_block, self.slab_bytes)
        self.downloaded_bytes = self.uploaded_bytes = 0
        self._units: list[_Unit] = []
        self._inside = False

    @contextmanager
    def unit(self, staying: Iterable[Tensor] = ()) -> Iterator[None]:
        """Around a forward pass. Where nothing needs gradients, nothing happens.

        Args:
            staying: tensors whose memory stays whoever saves it, as parameters.

        Raises:
            RuntimeError: in the unit before, a saved tensor was changed in place; or it has not ended.
        """
        if self._inside:
            raise RuntimeError("a unit of activations begins within another one")
        if not torch.is_grad_enabled():
            yield
            return
        while self._units and not self._units[-1].saved:  # its backward pass is over
            self._units.pop()
        if self._units:
            for saved in list(self._units[-1].saved.values()):
                saved.leave()
        unit = _Unit(self._units[-1] if self._units else None, {tensor.untyped_storage()._cdata for tensor in staying})
        self._units.append(unit)
        self._inside = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, unit), self._unpack):
                yield
        finally:
            self._inside = False

    def _pack(self, unit: _Unit, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        stays = storage._cdata in unit.staying or storage._cdata in self.device.storages
        if stays or not tensor.is_floating_point() or storage.nbytes() < self.small_bytes:
            return tensor.detach()  # the tensor itself would hold its own graph
        key = (storage._cdata, tensor.dtype)
        saved = unit.saved.get(key)
        if saved is None:
            numel = storage.nbytes() // tensor.itemsize
            saved = unit.saved[key] = _Saved(self, unit, tensor.detach().as_strided((numel,), (1,), 0))
        return _View(saved, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        unit = packed.saved.unit
        memory = packed.saved.read()
        if not unit.reached:
            unit.reached = True
            for saved in reversed(list(unit.before.saved.values())) if unit.before is not None else ():
                saved.fetch()
        return memory.as_strided(packed.shape, packed.stride, packed.offset)

    @property
    def host_bytes(self) -> int:
        """What is held there, in use or not; those of a step serve the next."""
        return self.arena.num_bytes

    def close(self) -> None:
        """Gives the host's memory back; what a graph still needs follows when that goes."""
        self.arena.close()


class _Unit:
    """
    Attributes:
        before: the unit whose backward pass comes next.
        staying: ``_cdata`` of storages.
        saved: by storage and type, as long as a graph needs them.
        reached: the backward pass has come here.
    """

    def __init__(self, before: _Unit | None, staying: set[int]) -> None:
        self.before, self.staying = before, staying
        self.saved: weakref.WeakValueDictionary[tuple[int, torch.dtype], _Saved] = weakref.WeakValueDictionary()
        self.reached = False


class _View(NamedTuple):
    """What autograd keeps in place of a tensor."""

    saved: _Saved
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int


class _Saved:
    """A storage on its way; it ends with the last graph that needs it.

    Args:
        memory: [numel], all of the storage.
    """

    def __init__(self, owner: ActivationOffload, unit: _Unit, memory: Tensor) -> None:
        self.unit = unit
        self._owner, self._device = owner, owner.device
        self._numel, self._dtype, self._version = len(memory), memory.dtype, memory._version
        self._slab, self._offset = owner.arena.take(memory.nbytes)
        self._memory: Tensor | None = memory
        self._left = False
        self._device.computes_on(memory, write=True)
        # The copy that is under way, down or up.
        self._copied: Event = self._device.download(memory, self._host(), memory, [self._device.compute_event()])
        owner.downloaded_bytes += memory.nbytes

    def _host(self) -> Tensor:
        return self._slab.block.view(self._dtype, self._offset, (self._numel,))

    def leave(self) -> None:
        """Frees the memory that autograd saved, once its copy is on the host."""
        if not self._left:
            self._check_version()
            self._free()
            self._left = True

    def fetch(self) -> None:
        """Starts the upload, where one is needed."""
        if self._memory is None:
            self._memory = self._device.empty(self._numel, self._dtype)
            after = [self._device.compute_event()]
            self._copied = self._device.upload(self._host(), self._memory, self._memory, after)
            self._owner.uploaded_bytes += self._memory.nbytes

    def read(self) -> Tensor:
        """[numel] on the device, for the computation that is queued next."""
        self.fetch()
        assert self._memory is not None
        if self._left:
            self._device.compute_waits(self._copied)
        else:
            self._check_version()
        self._device.computes_on(self._memory, write=False)
        return self._memory

    def _check_version(self) -> None:
        """Behind hooks, autograd leaves this to them."""
        if self._memory is not None and self._memory._version != self._version:
            raise RuntimeError("a tensor that autograd had saved for the backward pass was changed in place")

    def _free(self) -> None:
        if self._memory is not None:
            self._device.compute_waits(self._copied)
            self._device.computes_on(self._memory, write=True)  # as whoever has this memory next may
            self._memory = None

    def __del__(self) -> None:
        self._free()
        self._owner.arena.give(self._slab)
