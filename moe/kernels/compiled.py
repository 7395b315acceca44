"""The experts' products by a C++ kernel of our own, for float32 on processors with AVX-512; compiled at first use.

About a tenth faster than ``grouped_mm``, which calls a BLAS expert by expert
(scripts/benchmarks/results/moe_layer_speed.md).
"""

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

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("expert_products.cpp")
# OpenMP: the threads are PyTorch's own, since both load the same library of that name.
FLAGS = ("-O3", "-std=c++17", "-march=x86-64-v4", "-fopenmp", "-fPIC", "-shared")


class CompiledProducts:
    """The products of ``moe.kernels.products.Products`` for float32 on this CPU; waits for nothing.

    Of experts with more than 32 rows, and of those with fewer, a row's result does not depend on the other rows.
    """

    def __init__(self, counts: Tensor, library: ctypes.CDLL) -> None:
        self.ends = counts.cumsum(0)
        self.library = library

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._multiply_rows(rows, weight.contiguous().mT)

    def input_grad(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._multiply_rows(rows, weight.contiguous())

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = left.contiguous(), right.contiguous()
        output = left.new_empty(len(self.ends), left.shape[1], right.shape[1])
        self.library.sum_outer_products(
            *_pointers(left, right, output, self.ends), *output.shape, torch.get_num_threads()
        )
        return output

    def bias_grad(self, rows: Tensor) -> Tensor:
        return self.weight_grad(rows.new_ones(len(rows), 1), rows).squeeze(1)

    def _multiply_rows(self, rows: Tensor, matrices: Tensor) -> Tensor:
        rows = rows.contiguous()
        output = rows.new_empty(len(rows), matrices.shape[2])
        self.library.multiply_rows(
            *_pointers(rows, matrices, output, self.ends),
            *matrices.shape,
            *matrices.stride()[1:],
            torch.get_num_threads(),
        )
        return output


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """None on processors without AVX-512, where it was not measured, and, with a warning, where it cannot be built."""
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        library = ctypes.CDLL(str(_build()))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"experts on this processor take a tenth longer, since their kernel could not be built: {reason.strip()}",
            stacklevel=2,
        )
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.multiply_rows.argtypes = [pointer] * 4 + [number] * 5 + [ctypes.c_int]
    library.multiply_rows.restype = None
    library.sum_outer_products.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int]
    library.sum_outer_products.restype = None
    return library


def _build() -> Path:
    """Renamed when it is whole: ranks may build side by side, and none waits for a lock that a killed one left."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("there is no g++, and CXX names no other compiler")
    command = [compiler, *FLAGS, str(SOURCE), "-o"]
    identity = hashlib.sha256(SOURCE.read_bytes() + " ".join(command).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m6-recipes"
    library = folder / f"{SOURCE.stem}_{identity}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".so", delete=False) as file:
            made = Path(file.name)
        try:
            subprocess.run([*command, str(made)], capture_output=True, text=True, check=True)
            made.replace(library)
        finally:
            made.unlink(missing_ok=True)
    return library
