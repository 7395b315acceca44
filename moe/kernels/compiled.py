"""The experts' products by a C++ kernel of our own, for float32 on processors with AVX-512.

About a tenth faster than ``grouped_mm``, which calls a BLAS expert by expert
(scripts/benchmarks/results/moe_layer_speed.md).
"""

import ctypes
import functools
import platform
from pathlib import Path

import torch
from torch import Tensor

import host_kernels

SOURCE = Path(__file__).with_name("expert_products.cpp")
FLAGS = ("-march=x86-64-v4", "-fopenmp")  # PyTorch's own threads: both load the same OpenMP library


class CompiledProducts:
    """The products of ``moe.kernels.products.Products`` for float32 on this CPU; waits for nothing.

    Every element is summed in one order whatever the number of rows, so a row's result does not depend on the others.
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
    """None on processors without AVX-512, where it was not measured, and, with a warning, without a compiler."""
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    library = host_kernels.load_kernel(SOURCE, FLAGS, "experts on this processor are computed about a tenth slower")
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.multiply_rows.argtypes = [pointer] * 4 + [number] * 5 + [ctypes.c_int]
        library.multiply_rows.restype = None
        library.sum_outer_products.argtypes = [pointer] * 4 + [number] * 3 + [ctypes.c_int]
        library.sum_outer_products.restype = None
    return library
