"""How fast, how much of the hardware's speed, how much memory."""

from __future__ import annotations

import functools
import time

import psutil
import torch

from m6.model.configuration import M6Config
from m6.model.counting import num_parameters

# Dense bf16 peak of a device in FLOP/s, from the vendor's data sheet, by a part of the device's name.
_DATASHEET_FLOPS = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12, "GB200": 2500e12}


def training_flops(config: M6Config, tokens: float, targets: float, sequence_length: int) -> float:
    """FLOPs of forward and backward: 6 per parameter that multiplies a token (Kaplan et al. 2020, arXiv
    2001.08361, section 2.1), with the output matrix at targets only, plus attention over half a row on average.

    Looking up embeddings costs nothing, and recomputation is not counted.
    """
    counts = num_parameters(config)
    per_token = 6.0 * (counts["active_per_token"] - counts["embeddings"])
    per_token += 6.0 * config.num_layers * config.hidden_size * sequence_length
    return tokens * per_token + targets * 6.0 * config.vocab_size * config.hidden_size


@functools.cache
def peak_flops(device_type: str) -> float:
    """Peak FLOP/s of this device: the data sheet's for known GPUs, a measured fp32 matmul on a CPU."""
    if device_type == "cuda":
        name = torch.cuda.get_device_name()
        return next((flops for part, flops in _DATASHEET_FLOPS.items() if part in name), float("nan"))
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    best = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begin)
    return 2.0 * size**3 / best


def memory_bytes(device: torch.device) -> int:
    """Peak bytes allocated on the GPU since the start, or the resident bytes of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
