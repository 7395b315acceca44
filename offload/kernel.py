"""The host optimizer's kernel, compiled at first use."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import host_kernels

_SOURCE = Path(__file__).with_name("host_optimizer.cpp")
_FLAGS = ("-march=native", "-ffp-contract=off", "-fno-math-errno")
_COUNT, _INT, _POINTER, _FLOAT = ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_float
_TENSORS: list[Any] = [_COUNT, _INT, _POINTER, _POINTER, _POINTER, _INT]


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """None, with a warning, where there is no compiler: then PyTorch does the same arithmetic."""
    library = host_kernels.load_kernel(_SOURCE, _FLAGS, "the host optimizer runs several times slower")
    if library is not None:
        library.adamw.argtypes = [*_TENSORS, _POINTER, _POINTER, *[_FLOAT] * 9]
        library.adamw.restype = None
        library.sgd.argtypes = [*_TENSORS, _POINTER, *[_FLOAT] * 4]
        library.sgd.restype = None
        library.sum_of_squares.argtypes = [_COUNT, _POINTER, _INT]
        library.sum_of_squares.restype = ctypes.c_double
    return library
