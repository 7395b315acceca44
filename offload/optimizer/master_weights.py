"""Storage of the fp32 values of parameters: as weight and remainder, or stochastically rounded without a remainder.

The C++ kernel of the host optimizer is compiled at first use.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from native import load_library

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernel's numbers of types."""

_SOURCE = Path(__file__).with_name("host_optimizer.cpp")
# -ffp-contract=off: a fused multiply-add would round once where the PyTorch code rounds twice. -fno-trapping-math:
# without it compilers do not vectorize a choice between two results of arithmetic.
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
)
_COUNT, _INT, _POINTER, _FLOAT = ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_float
_TENSORS: list[Any] = [_COUNT, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _INT, ctypes.c_uint32]


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Builds or finds the kernel and loads it.

    Returns:
        None, after a warning, if it cannot be built. ``offload.optimizer.update`` then does the same arithmetic with
        PyTorch.
    """
    kernel = load_library(_SOURCE, _FLAGS, ("g++", "clang++"), "the host optimizer runs several times slower")
    if kernel is None:
        return None
    kernel.adamw.argtypes = [*_TENSORS, _POINTER, _POINTER, *[_FLOAT] * 9]
    kernel.adamw.restype = None
    kernel.sgd.argtypes = [*_TENSORS, _POINTER, *[_FLOAT] * 4]
    kernel.sgd.restype = None
    kernel.adafactor.argtypes = [*_TENSORS, _COUNT, _POINTER, _POINTER, *[_FLOAT] * 6, *[ctypes.c_double] * 3]
    kernel.adafactor.restype = None
    kernel.sum_of_squares.argtypes = [_COUNT, _POINTER, _INT]
    kernel.sum_of_squares.restype = ctypes.c_double
    kernel.round_at_random.argtypes = [_COUNT, _POINTER, _POINTER, _INT, ctypes.c_uint32]
    kernel.round_at_random.restype = None
    return kernel


_LOW = 0xFFFFFFFF
_SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal


def remainder_dtype(dtype: torch.dtype, masters: bool = True) -> torch.dtype | None:
    """Returns the type of the remainder stored with a weight of type ``dtype``; None if there is none.

    A bfloat16 number is the upper half of an fp32 number, so the lower 16 bits suffice as the remainder: 4 bytes for
    each parameter instead of 6 ("split master"). The weight is the upper half rounded half up. The lower half alone
    then shows whether the upper half was rounded up. This rounding differs from PyTorch's at exact ties only.

    Args:
        masters: False: 16-bit weights have no fp32 master; updates round them stochastically.
    """
    if not masters:
        return None
    return {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.float32}[dtype]


def read_master(weight: Tensor, remainder: Tensor | None) -> Tensor:
    """Returns the fp32 values; for an fp32 weight the weight itself, not a copy."""
    if remainder is None:
        return weight.float()
    if remainder.dtype == torch.float32:
        return remainder
    lower = remainder.to(torch.int32) & 0xFFFF
    upper = weight.view(torch.int16).to(torch.int32) - (lower >> 15)
    return (upper << 16 | lower).view(torch.float32)


def write_master(value: Tensor, weight: Tensor, remainder: Tensor | None, step: int | None = None) -> None:
    """Stores fp32 values as a weight and its remainder.

    Args:
        step: the number of the update. Without a remainder a 16-bit weight is rounded stochastically. The random
            numbers depend only on the step and the value, so not on where the weight lies. None: it is rounded to
            nearest.
    """
    if remainder is None:
        if step is None or weight.dtype == torch.float32:
            weight.copy_(value)
        else:
            _round_at_random(value.contiguous(), weight, step)
        return
    if weight.dtype == torch.float16:
        remainder.copy_(value)
        weight.copy_(value)
        return
    bits = value.view(torch.int32)
    # The sum may overflow int32 for the largest values. It wraps around, and the upper 16 bits are still right.
    weight.view(torch.int16).copy_(((bits + 0x8000) >> 16).to(torch.int16))
    remainder.copy_(bits.to(torch.int16))


def _round_at_random(value: Tensor, weight: Tensor, step: int) -> None:
    """Rounds up with the probability of the distance to the lower neighbour, so the mean is the value.

    Gupta et al. 2015 (arXiv 1502.02551), section 3, "stochastic rounding". Without it an update of less than half of
    the last place would be lost every time.
    """
    kernel = load_kernel() if value.device.type == "cpu" else None
    if kernel is not None and weight.is_contiguous():
        kernel.round_at_random(value.numel(), value.data_ptr(), weight.data_ptr(), DTYPE_CODES[weight.dtype], step)
        return
    bits = value.view(torch.int32)
    noise = _noise(bits, step)
    if weight.dtype == torch.bfloat16:
        weight.view(torch.int16).copy_((bits.long() + (noise & 0xFFFF) >> 16).to(torch.int16))
        return
    # fp32 has 13 more bits of mantissa than float16. Below float16's smallest normal number the distance of neighbours
    # is constant, 2^-24.
    normal = (bits.long() + (noise & 0x1FFF) & ~0x1FFF).to(torch.int32).view(torch.float32)
    small = (value.abs() * 2.0**24 + (noise & 0x1FFF).float() * 2.0**-13).floor_() * 2.0**-24
    weight.copy_(torch.where(value.abs() < _SMALLEST_NORMAL, small.copysign(value), normal))


def _noise(bits: Tensor, step: int) -> Tensor:
    """Hashes the bits of fp32 values and the step to 32 bits, by Wellons' function lowbias32."""
    mixed = (bits.long() & _LOW) ^ (step * 0x9E3779B9 & _LOW)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ mixed >> shift) * factor & _LOW
    return mixed ^ mixed >> 16
