"""Loads the C++ kernel of the host optimizer, which is compiled at first use."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

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
