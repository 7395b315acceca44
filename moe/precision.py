"""Queries of autocast. They also work on devices without autocast, such as the meta device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Returns a context in which autocast is off for this tensor's kind of device."""
    device_type = tensor.device.type
    available = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if available else nullcontext()


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Returns autocast's type for this tensor; None if autocast is off, and for float64, never converted by it."""
    device_type = tensor.device.type
    if tensor.dtype == torch.float64:
        return None
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None
