"""The experts' products by a C++ kernel of our own, for float32 on processors with AVX-512; compiled at first use.

About a tenth faster than ``grouped_mm``, which calls a BLAS expert by expert
(scripts/benchmarks/results/moe_layer_speed.md).
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("expert_products.cpp")
# OpenMP: PyTorch's wheels for Linux bring GCC's library, so that the threads are the same.
FLAGS = ("-O3", "-std=c++17", "-march=x86-64-v4", "-fopenmp", "-fPIC", "-shared")


class CompiledProducts:
    """The products of ``moe.kernels.products.Products`` for float32 on this CPU.

    Of the other rows, a row's result depends on nothing but whether its expert has more than 32.
    """

    def __init__(self, counts: Tensor, kernel: ctypes.CDLL) -> None:
        self.ends = counts.cumsum(0)
        self._kernel = kernel

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._multiply_rows(rows, weight.contiguous().mT)

    def input_grad(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._multiply_rows(rows, weight.contiguous())

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        self._check(left, right)
        left, right = left.contiguous(), right.contiguous()
        output = left.new_empty(len(self.ends), left.shape[1], right.shape[1])
        self._kernel.sum_outer_products(
            *_pointers(left, right, output, self.ends), *output.shape, torch.get_num_threads()
        )
        return output

    def bias_grad(self, rows: Tensor) -> Tensor:
        return self.weight_grad(rows.new_ones(len(rows), 1), rows).squeeze(1)

    def _multiply_rows(self, rows: Tensor, matrices: Tensor) -> Tensor:
        self._check(rows, matrices)
        if matrices.shape[:2] != (len(self.ends), rows.shape[1]):
            raise ValueError(f"rows {tuple(rows.shape)} do not fit matrices {tuple(matrices.shape)}")
        rows = rows.contiguous()
        output = rows.new_empty(len(rows), matrices.shape[2])
        self._kernel.multiply_rows(
            *_pointers(rows, matrices, output, self.ends),
            *matrices.shape,
            *matrices.stride()[1:],
            torch.get_num_threads(),
        )
        return output

    def _check(self, rows: Tensor, other: Tensor) -> None:
        """What PyTorch's own operators would check, since the kernel sees addresses alone."""
        for tensor in (rows, other):
            if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ValueError(f"expected float32 on a CPU, got {tensor.dtype} on {tensor.device}")
        if len(rows) != int(self.ends[-1]) or (other.dim() == 2 and len(other) != len(rows)):
            raise ValueError(f"{len(rows)} and {len(other)} rows, but the experts count {int(self.ends[-1])}")


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """None on processors without AVX-512, where it was not measured, and, with a warning, where it cannot be built."""
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        kernel = ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:  # RuntimeError: a user without a home
        reason = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"experts on this processor take a tenth longer, since their kernel could not be built: {reason.strip()}",
            stacklevel=2,
        )
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.multiply_rows.argtypes = [pointer] * 4 + [number] * 5 + [ctypes.c_int]
    kernel.multiply_rows.restype = None
    kernel.sum_outer_products.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int]
    kernel.sum_outer_products.restype = None
    return kernel


def _build() -> Path:
    """Linked under its name when it is whole: ranks may build side by side, none waits for a lock that a killed one
    left, and none loses the file that it has mapped already."""
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or "")
    if not compiler:
        raise FileNotFoundError("there is no g++, and CXX names no other compiler")
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    identity = "\n".join((SOURCE.read_text(encoding="utf-8"), *compiler, *FLAGS, version))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "m6-recipes"
    library = folder / f"{SOURCE.stem}_{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary) / library.name
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(made, library)
    return library
