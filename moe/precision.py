"""Autocast, asked about devices that do not know it (the meta device) too."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Operators inside compute in their operands' types, on this tensor's kind of device."""
    device_type = tensor.device.type
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that autocast wants on this tensor's kind of device; None where it is off."""
    device_type = tensor.device.type
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
