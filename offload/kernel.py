"""Compiles the host optimizer's kernel at first use, within seconds, and loads it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared")
_COUNT, _INT, _POINTER, _FLOAT = ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_float
_TENSORS: list[Any] = [_COUNT, _INT, _POINTER, _POINTER, _POINTER, _INT]


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """The compiled kernel; None, with a warning, where there is no compiler: then PyTorch does the same arithmetic.

    The library is built under a temporary name and linked under its own, in a folder named after the source, the
    compiler and the processor. So processes that start together may all build it, none waits for a lock that a killed
    one left, and a home directory that unlike machines share holds one library for each.
    """
    try:
        return _declare(ctypes.CDLL(str(_build())))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: a user without a home
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"the host optimizer runs several times slower, since its kernel could not be built: {reason.strip()}",
            stacklevel=2,
        )
        return None


def _build() -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler: install g++, or name one in CXX")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join((_SOURCE.read_text(encoding="utf-8"), *_FLAGS, version, _processor()))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m6-recipes"
    library = cache / f"host_optimizer_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / library.name
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            with contextlib.suppress(FileExistsError):
                os.link(built, library)  # another process may have mapped the one that is there
    return library


def _processor() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.adamw.argtypes = [*_TENSORS, _POINTER, _POINTER, *[_FLOAT] * 9]
    library.adamw.restype = None
    library.sgd.argtypes = [*_TENSORS, _POINTER, *[_FLOAT] * 4]
    library.sgd.restype = None
    library.sum_of_squares.argtypes = [_COUNT, _POINTER, _INT]
    library.sum_of_squares.restype = ctypes.c_double
    return library
