"""Moves activations to the host until the backward pass needs them.

Their memory on the host is reused, and allocated and freed in the order of a stack.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from offload.devices.device import Event
from offload.memory.layout import Viewable

_ALIGNMENT = 512  # bytes: the alignment of device memory; copies are fastest with it


class Block(Viewable, Protocol):
    """A block of host memory; see ``HostBlock``."""

    def free(self) -> None:
        """Frees the memory."""


class Slab:
    """A block, divided into pieces from its start; it is reused when all pieces have been returned."""

    def __init__(self, block: Block, num_bytes: int) -> None:
        self.block, self.num_bytes = block, num_bytes
        self.used_bytes = self.num_pieces = 0


class Arena:
    """Gives out pieces of slabs of host memory. Slabs are kept for reuse, because pinning a block is slow.

    Args:
        new_block: makes a block of the given size.
        slab_bytes: the size of slabs; a larger piece gets a slab of its own size.

    Attributes:
        num_bytes: the size of all slabs.
    """

    def __init__(self, new_block: Callable[[int], Block], slab_bytes: int) -> None:
        self._new_block, self._slab_bytes = new_block, slab_bytes
        self._slabs: list[Slab] = []
        self._closed = False
        self.num_bytes = 0

    def take(self, num_bytes: int) -> tuple[Slab, int]:
        """Returns a piece of ``num_bytes`` bytes, as its slab and its offset there."""
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        fitting = (slab for slab in self._slabs if slab.used_bytes + num_bytes <= slab.num_bytes)
        slab = next(fitting, None)
        if slab is None:
            size = max(num_bytes, self._slab_bytes)
            slab = Slab(self._new_block(size), size)
            self._slabs.append(slab)
            self.num_bytes += size
        offset = slab.used_bytes
        slab.used_bytes += num_bytes
        slab.num_pieces += 1
        return slab, offset

    def give(self, slab: Slab) -> None:
        """Returns a piece of this slab to the arena."""
        slab.num_pieces -= 1
        if slab.num_pieces == 0:
            slab.used_bytes = 0
            if self._closed:
                slab.block.free()

    def close(self) -> None:
        """Frees all slabs. A slab with pieces in use is freed when the last of them is returned."""
        self._closed = True
        for slab in self._slabs:
            if slab.num_pieces == 0:
                slab.block.free()


class CopyDevice(Protocol):
    """The methods of ``Device`` for copies of activations; see there."""

    storages: set[int]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns a tensor [numel] with undefined content."""

    def upload(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> Event:
        """Queues a copy to the device."""

    def download(self, source: Tensor, target: Tensor, memory: Tensor, after: Sequence[Event]) -> Event:
        """Queues a copy to the host."""

    def compute_event(self) -> Event:
        """Returns the end of the computation queued so far."""

    def compute_waits(self, event: Event) -> None:
        """Makes later computation wait for an event."""

    def computes_on(self, memory: Tensor, write: bool) -> None:
        """Declares an access by the computation."""


class ActivationOffload:
    """Moves tensors saved by autograd in parts of a model to the host, and back before the backward pass reads them.

    Each call of such a part is a **unit**. Inside ``unit``, the download of a storage starts as soon as autograd saves
    a tensor of it. Its device memory is freed when the next unit begins. The memory of the last unit therefore stays
    until the backward pass. In the backward pass, the first read of a unit starts the uploads of the unit before it
    (prefetch). Device memory of activations is not in buffers. So traces count it as non-model memory, and plans see
    the smaller number.

    Whole storages are moved. So a storage is moved once even if several operators save it or views of it, strides do
    not change, and results are bit-identical. Not moved are parameters, weights of chunks, small storages, and
    integers and masks, since layers share them. If a unit contains a checkpointed function, only the function's inputs
    are moved.

    Args:
        device: the accelerator.
        new_block: makes host memory of the given size.

    Attributes:
        slab_bytes: the size in which host memory is allocated.
        small_bytes: smaller storages are not moved: starting a copy takes as long as moving about 100 KiB.
        downloaded_bytes, uploaded_bytes: the bytes moved so far.
    """

    small_bytes = 2**16
    slab_bytes = 2**25

    def __init__(self, device: CopyDevice, new_block: Callable[[int], Block]) -> None:
        self.device = device
        self.arena = Arena(new_block, self.slab_bytes)
        self.downloaded_bytes = self.uploaded_bytes = 0
        self._units: list[_Unit] = []
        self._inside = False

    @contextmanager
    def unit(self, excluded: Iterable[Tensor] = ()) -> Iterator[None]:
        """Makes the forward pass inside ``with`` a unit; without gradients it does nothing.

        Args:
            excluded: tensors with storages to leave on the device, such as parameters.

        Raises:
            RuntimeError: a saved tensor of the unit before was changed in place, or the unit before has not ended.
        """
        if self._inside:
            raise RuntimeError("a unit of activations begins within another one")
        if not torch.is_grad_enabled():
            yield
            return
        while self._units and not self._units[-1].saved:  # autograd has freed all of its tensors
            self._units.pop()
        if self._units:
            for saved in list(self._units[-1].saved.values()):
                saved.free_device_memory()
        unit = _Unit(self._units[-1] if self._units else None, {tensor.untyped_storage()._cdata for tensor in excluded})
        self._units.append(unit)
        self._inside = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, unit), self._unpack):
                yield
        finally:
            self._inside = False

    def _pack(self, unit: _Unit, tensor: Tensor) -> Tensor | _View:
        """Returns the object for autograd to save instead of a tensor."""
        storage = tensor.untyped_storage()
        fixed = storage._cdata in unit.excluded or storage._cdata in self.device.storages
        if fixed or not tensor.is_floating_point() or storage.nbytes() < self.small_bytes:
            return tensor.detach()  # the tensor itself would keep its graph alive in a reference cycle
        # Several operators may save views of one storage: it is moved once for each dtype of such a view.
        key = (storage._cdata, tensor.dtype)
        saved = unit.saved.get(key)
        if saved is None:
            numel = storage.nbytes() // tensor.itemsize
            saved = unit.saved[key] = _Saved(self, unit, tensor.detach().as_strided((numel,), (1,), 0))
        return _View(saved, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        """Returns the tensor again in the backward pass."""
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
        """The allocated host memory, in use or kept for the next step."""
        return self.arena.num_bytes

    def close(self) -> None:
        """Frees the host memory; memory still needed by a graph is freed with the graph."""
        self.arena.close()


class _Unit:
    """One unit.

    Attributes:
        before: the previous unit in the forward pass, so the next one in the backward pass.
        excluded: ``_cdata`` of the storages to leave on the device.
        saved: the saved storages by storage and type, while a graph needs them.
        reached: whether the backward pass has reached the unit.
    """

    def __init__(self, before: _Unit | None, excluded: set[int]) -> None:
        self.before, self.excluded = before, excluded
        self.saved: weakref.WeakValueDictionary[tuple[int, torch.dtype], _Saved] = weakref.WeakValueDictionary()
        self.reached = False


class _View(NamedTuple):
    """Saved by autograd instead of a tensor: the storage, and the tensor's place in it."""

    saved: _Saved
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int


class _Saved:
    """A moved storage. It is deleted with the last graph referring to it.

    Args:
        owner: gives host memory and counts bytes.
        unit: the unit in which it was saved.
        memory: [numel], the whole storage.
    """

    def __init__(self, owner: ActivationOffload, unit: _Unit, memory: Tensor) -> None:
        self.unit = unit
        self._owner, self._device = owner, owner.device
        self._numel, self._dtype, self._version = len(memory), memory.dtype, memory._version
        self._slab, self._offset = owner.arena.take(memory.nbytes)
        self._memory: Tensor | None = memory
        self._downloaded = False
        self._device.computes_on(memory, write=True)
        # The end of the last copy, down or up.
        self._copied: Event = self._device.download(memory, self._host(), memory, [self._device.compute_event()])
        owner.downloaded_bytes += memory.nbytes

    def _host(self) -> Tensor:
        return self._slab.block.view(self._dtype, self._offset, (self._numel,))

    def free_device_memory(self) -> None:
        """Frees the device memory, after the download."""
        if not self._downloaded:
            self._check_version()
            self._free()
            self._downloaded = True

    def fetch(self) -> None:
        """Starts the upload, if the storage is not on the device."""
        if self._memory is None:
            self._memory = self._device.empty(self._numel, self._dtype)
            after = [self._device.compute_event()]
            self._copied = self._device.upload(self._host(), self._memory, self._memory, after)
            self._owner.uploaded_bytes += self._memory.nbytes

    def read(self) -> Tensor:
        """Returns the storage [numel] on the device, for computation queued from now on."""
        self.fetch()
        assert self._memory is not None
        if self._downloaded:
            self._device.compute_waits(self._copied)
        else:
            self._check_version()
        self._device.computes_on(self._memory, write=False)
        return self._memory

    def _check_version(self) -> None:
        """Checks the tensor's version counter; with hooks, autograd does not check it itself.

        Raises:
            RuntimeError: it was changed in place.
        """
        if self._memory is not None and self._memory._version != self._version:
            raise RuntimeError("a tensor that autograd had saved for the backward pass was changed in place")

    def _free(self) -> None:
        if self._memory is not None:
            self._device.compute_waits(self._copied)
            self._device.computes_on(self._memory, write=True)  # the next owner of this memory may write to it
            self._memory = None

    def __del__(self) -> None:
        self._free()
        self._owner.arena.give(self._slab)
