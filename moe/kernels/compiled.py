"""The experts' matrix products by our own C++ kernel, for float32 on processors with AVX-512.

About a tenth faster than ``grouped_mm``, which calls a BLAS expert by expert, on the AMD EPYC of
scripts/benchmarks/results/moe_layer_speed.md. Other processors differ, so each machine measures both once.
"""

import ctypes
import functools
import os
import platform
import statistics
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from native import load_library, processor_name, remembered

EXPERT_PRODUCTS = Path(__file__).with_name("expert_products.cpp")
# -fopenmp: PyTorch's wheels for Linux contain GCC's OpenMP library, so the kernel uses the same threads as PyTorch.
_VARIABLE, _CHOICES = "M6_RECIPES_EXPERTS", ("compiled", "pytorch")
_MEASURED, _WIDTH, _ROUNDS = ((4, 64), (16, 8)), 256, 3
"""Shapes (experts, rows of each), width, and number of measured rounds: in all a few GFLOP."""
FLAGS = ("-O3", "-std=c++17", "-march=x86-64-v4", "-fopenmp", "-fPIC", "-shared")


class CompiledProducts:
    """The ``Products`` of ``moe.kernels.products`` by the C++ kernel, for float32 on this CPU.

    The result for a row does not depend on the other rows, except on whether its expert has more than 32 rows.

    Args:
        counts: [E] int64, the number of rows of each expert.
        kernel: what ``load_kernel`` returned.
    """

    def __init__(self, counts: Tensor, kernel: ctypes.CDLL) -> None:
        self.ends = counts.cumsum(0)
        self._kernel = kernel

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e^T; see ``Products``."""
        return self._multiply_rows(rows, weight.contiguous().mT)

    def input_grad(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e; see ``Products``."""
        return self._multiply_rows(rows, weight.contiguous())

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """Computes left_e^T @ right_e; see ``Products``."""
        self._check(left, right)
        left, right = left.contiguous(), right.contiguous()
        output = left.new_empty(len(self.ends), left.shape[1], right.shape[1])
        self._kernel.sum_outer_products(
            *_pointers(left, right, output, self.ends), *output.shape, torch.get_num_threads()
        )
        return output

    def bias_grad(self, rows: Tensor) -> Tensor:
        """Computes the sum of each expert's rows; see ``Products``."""
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
        """Checks types, devices and numbers of rows as PyTorch's operators do. The kernel gets only addresses.

        Raises:
            ValueError: a type, a device or a number of rows is wrong.
        """
        for tensor in (rows, other):
            if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ValueError(f"expected float32 on a CPU, got {tensor.dtype} on {tensor.device}")
        if len(rows) != int(self.ends[-1]) or (other.dim() == 2 and len(other) != len(rows)):
            raise ValueError(f"{len(rows)} and {len(other)} rows, but the experts count {int(self.ends[-1])}")


def _pointers(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@functools.cache
def load_kernel() -> ctypes.CDLL | None:
    """Builds or finds the kernel and loads it.

    Returns:
        The kernel, or None: on processors without AVX-512, without the C++ file (exported models lack it), after a
        failed build (with a warning), or if PyTorch is faster here.
    """
    forced = os.environ.get(_VARIABLE, "")
    if forced not in ("", *_CHOICES):
        warnings.warn(f"{_VARIABLE}={forced} is ignored: expected {' or '.join(_CHOICES)}", stacklevel=2)
        forced = ""
    # The kernel itself needs AVX-512, so it must not be loaded elsewhere.
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    if not EXPERT_PRODUCTS.is_file() or forced == "pytorch":
        return None
    kernel = load_library(EXPERT_PRODUCTS, FLAGS, ("g++",), "experts on this processor take a tenth longer")
    if kernel is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.multiply_rows.argtypes = [pointer] * 4 + [number] * 5 + [ctypes.c_int]
    kernel.multiply_rows.restype = None
    kernel.sum_outer_products.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int]
    kernel.sum_outer_products.restype = None
    asked = f"{processor_name()} {torch.get_num_threads()} threads torch {torch.__version__}"
    # The results differ by rounding, so a resumed run should use the same kernel: the choice is stored.
    chosen = forced or remembered(kernel, asked, lambda: _faster(kernel), "compiled")
    return None if chosen == "pytorch" else kernel


def _faster(kernel: ctypes.CDLL) -> str:
    """Returns the faster of ``_CHOICES``, for forward and backward products with few and with many rows per expert."""
    seconds: dict[str, list[float]] = {choice: [] for choice in _CHOICES}
    with torch.no_grad():
        cases = [_Case(num_experts, num_rows) for num_experts, num_rows in _MEASURED]
        for round_number in range(_ROUNDS + 1):
            for choice in _CHOICES:
                begin = time.perf_counter()
                for case in cases:
                    case.compiled(kernel) if choice == "compiled" else case.grouped()
                if round_number:  # the first round allocates memory
                    seconds[choice].append(time.perf_counter() - begin)
    return min(_CHOICES, key=lambda choice: statistics.median(seconds[choice]))


class _Case:
    """The products of a layer of experts with equal loads."""

    def __init__(self, num_experts: int, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.counts = torch.full((num_experts,), num_rows)
        self.ends = self.counts.cumsum(0, dtype=torch.int32)
        self.rows = torch.randn(num_experts * num_rows, _WIDTH, generator=generator)
        self.hidden = torch.randn(num_experts * num_rows, 4 * _WIDTH, generator=generator)
        self.weight = torch.randn(num_experts, 4 * _WIDTH, _WIDTH, generator=generator)

    def compiled(self, kernel: ctypes.CDLL) -> None:
        products = CompiledProducts(self.counts, kernel)
        products.forward(self.rows, self.weight)
        products.input_grad(self.hidden, self.weight)
        products.weight_grad(self.hidden, self.rows)

    def grouped(self) -> None:
        grouped_mm(self.rows, self.weight.mT, offs=self.ends)
        grouped_mm(self.hidden, self.weight, offs=self.ends)
        grouped_mm(self.hidden.mT, self.rows, offs=self.ends)
