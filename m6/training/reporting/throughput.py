"""Peak FLOP/s of devices, and memory in use."""

from __future__ import annotations

import psutil
import torch

# Peak FLOP/s of dense 16-bit matrix products by the vendors' data sheets; the key is a part of the device's name.
# A GB200 comes before a B200, whose name it contains.
_PEAK_FLOPS = {
    "V100": 125e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
}
_WITHOUT_BF16 = ("V100",)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The peak FLOP/s of a GPU in ``fp16`` or ``bf16`` by its data sheet; None if it is not known.

    A CPU has no such figure: what its libraries reach depends on their kernels and on the load.
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    if precision == "bf16" and any(model in name for model in _WITHOUT_BF16):
        return None
    return next((flops for model, flops in _PEAK_FLOPS.items() if model in name), None)


def memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the GPU since the start, or the resident memory of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
