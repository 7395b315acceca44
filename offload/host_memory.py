"""Host memory in blocks of exactly the size that is needed, fit for fast copies."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from offload.device import Device


class HostBlock:
    """A block of zeros, pinned where the system allows it.

    It is a mapping of its own: PyTorch's allocator for pinned memory rounds sizes up to powers of two, which costs up
    to twice the memory, and keeps what is freed. Blocks begin at pages, so that each can be pinned by itself.
    """

    def __init__(self, num_bytes: int, device: Device) -> None:
        self._device = device
        # Its memory goes back to the system with the last tensor that views it.
        self._bytes = torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)[:num_bytes]
        self._pinned = device.pin(self._bytes)

    def view(self, dtype: torch.dtype, offset_bytes: int, shape: Sequence[int]) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        return self._bytes[offset_bytes : offset_bytes + num_bytes].view(dtype).view(tuple(shape))

    def free(self) -> None:
        self._device.unpin(self._bytes, self._pinned)
        del self._bytes


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
