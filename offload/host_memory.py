"""Host memory in blocks of exactly the size that is needed, fit for fast copies."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from offload.device import Device

_ALIGNMENT = 512  # bytes, as those of device memory: what a copy engine likes


class HostBlock:
    """A block of zeros, pinned where the system allows it.

    It is a mapping of its own: PyTorch's allocator for pinned memory rounds sizes up to powers of two, which costs up
    to twice the memory, and keeps what is freed. Blocks begin at pages, so that each can be pinned by itself.
    """

    def __init__(self, num_bytes: int, device: Device) -> None:
        self._device = device
        # Its memory goes back to the system with the last tensor that views it. No operator makes it: a meter that
        # counts what operators make does not see it.
        self._bytes = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        self._pinned = device.pin(self._bytes)

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[offset_bytes : offset_bytes + num_bytes].view(dtype).view(tuple(shape))

    def free(self) -> None:
        self._device.unpin(self._bytes, self._pinned)
        del self._bytes


class Block(Protocol):
    """Host memory; see ``HostBlock``."""

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor: ...

    def free(self) -> None: ...


class Slab:
    """A block whose pieces are given out in order; when the last one is back, anew."""

    def __init__(self, block: Block, num_bytes: int) -> None:
        self.block, self.num_bytes = block, num_bytes
        self.used_bytes = self.num_pieces = 0


class Arena:
    """Host memory for what comes and goes as a stack does: slabs that stay, so that few blocks are ever pinned.

    Args:
        new_block: makes a block of a size.
        slab_bytes: what is larger gets a slab of its own size.

    Attributes:
        num_bytes: of all slabs.
    """

    def __init__(self, new_block: Callable[[int], Block], slab_bytes: int) -> None:
        self._new_block, self._slab_bytes = new_block, slab_bytes
        self._slabs: list[Slab] = []
        self._closed = False
        self.num_bytes = 0

    def take(self, num_bytes: int) -> tuple[Slab, int]:
        """A piece: its slab and its offset there."""
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
        """Takes a piece back."""
        slab.num_pieces -= 1
        if slab.num_pieces == 0:
            slab.used_bytes = 0
            if self._closed:
                slab.block.free()

    def close(self) -> None:
        """Frees all slabs; those with pieces that are still out when they are back."""
        self._closed = True
        for slab in self._slabs:
            if slab.num_pieces == 0:
                slab.block.free()


def available_bytes() -> int | None:
    """What processes on this host may still take, by the system and by their control group; None where neither says."""
    found = [1024 * number for number in _numbers(Path("/proc/meminfo"), "MemAvailable:")]
    for limit, usage, cache in _CONTROL_GROUPS:
        most, used = _numbers(Path(limit)), _numbers(Path(usage))
        if most and used:  # the cache of files makes room when memory is asked for
            reclaimable = sum(_numbers(Path(usage).with_name("memory.stat"), cache))
            found.append(max(0, most[0] - used[0] + reclaimable))
    return min(found, default=None)


_CONTROL_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "inactive_file"),
)


def _numbers(path: Path, name: str | None = None) -> list[int]:
    """The number behind ``name``, or that of a file which holds one number alone; empty where there is none."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    words = [line[0] for line in lines[:1]] if name is None else [line[1] for line in lines if line[0] == name]
    return [int(word) for word in words if word.isdigit()]
