"""Matrix products over rows sorted by expert: by our own kernel, by one grouped call, or in a loop."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import grouped_mm

from moe.kernels.compiled import CompiledProducts, load_kernel

# On a CPU, oneDNN multiplies 16-bit matrices. It compiles a kernel for every new number of rows, and this takes as long
# as a small product. The experts' numbers of rows hardly ever repeat, unless they are rounded up to a multiple of this.
CPU_ROWS = 64
# On CUDA one grouped product of PyTorch 2.13 takes fewer groups than this.
_CUDA_GROUPS = 1024


class Products(Protocol):
    """The matrix products of E experts. The rows are sorted by expert; each is multiplied by its expert's matrix."""

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e^T [R, Q] from rows [R, P] and weight [E, Q, P]."""

    def input_grad(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e [R, P] from rows [R, Q] and weight [E, Q, P]."""

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """Computes left_e^T @ right_e [E, Q, P] from left [R, Q] and right [R, P]; 0 for experts without rows."""

    def bias_grad(self, rows: Tensor) -> Tensor:
        """Computes the sum of each expert's rows [E, Q] from rows [R, Q]."""


def choose_products(rows: Tensor, counts: Tensor, *weights: Tensor) -> Products:
    """Returns the fastest valid implementation, as measured (scripts/benchmarks/results/moe_layer_speed.md).

    ``torch.nn.functional.grouped_mm`` supports neither float64 nor empty inputs. Each row of its operands must start at
    a multiple of 16 bytes, and on a GPU there must be fewer than 1,024 experts. On CPUs 16-bit products use the loop:
    in float32 if the processor has no 16-bit arithmetic (scripts/benchmarks/results/moe_layer_bfloat16_emulated.md),
    otherwise with padded rows, see CPU_ROWS.

    Args:
        rows: [R, D].
        counts: [E] int64, the number of rows of each expert.
        weights: stacked matrices [E, Q, P] to multiply with.
    """
    if all(each.device.type == "cpu" and each.dtype == torch.float32 for each in (rows, *weights)):
        kernel = load_kernel()
        if kernel is not None:
            return CompiledProducts(counts, kernel)
    if rows.device.type == "cpu" and rows.dtype.itemsize == 2:
        emulated = _is_emulated(rows)
        return LoopProducts(counts, torch.float32 if emulated else rows.dtype, 1 if emulated else CPU_ROWS)
    aligned = all(size * rows.element_size() % 16 == 0 for weight in weights for size in weight.shape[1:])
    known = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    few = rows.device.type == "cpu" or len(counts) < _CUDA_GROUPS
    if aligned and known and few and len(rows) > 0:
        return GroupedProducts(counts)
    return LoopProducts(counts, rows.dtype)


def _is_emulated(rows: Tensor) -> bool:
    """Returns whether this CPU lacks arithmetic for the rows' 16-bit type. PyTorch then emulates it slowly."""
    if rows.dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return not torch.ops.mkldnn._is_mkldnn_fp16_supported()


class GroupedProducts:
    """The products by one call of ``grouped_mm`` for all experts; the counts stay on the device.

    On CUDA this is one kernel for bfloat16 on compute capability 9 and above. Elsewhere PyTorch 2.13 itself loops over
    the experts, and waits for the counts.
    """

    def __init__(self, counts: Tensor) -> None:
        self.ends = counts.cumsum(0, dtype=torch.int32)

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e^T; see ``Products``."""
        return grouped_mm(rows, weight.mT, offs=self.ends)

    def input_grad(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e; see ``Products``."""
        return grouped_mm(rows, weight, offs=self.ends)

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """Computes left_e^T @ right_e; see ``Products``."""
        return grouped_mm(left.mT, right, offs=self.ends)

    def bias_grad(self, rows: Tensor) -> Tensor:
        """Computes the sum of each expert's rows; see ``Products``."""
        # A sum of rows is a product with ones. grouped_mm needs at least 16 bytes in each row.
        ones = rows.new_ones(len(rows), 16 // rows.element_size())
        return grouped_mm(ones.mT, rows, offs=self.ends)[:, 0].contiguous()


class LoopProducts:
    """The products in a loop over the experts; the host waits for the counts.

    Operands are converted to ``compute_dtype`` for one expert after the other, so only one expert's copies exist.

    Args:
        counts: [E] int64, the number of rows of each expert.
        compute_dtype: the type of the products.
        multiple: each expert's rows are padded with zeros to a multiple of this number.
    """

    def __init__(self, counts: Tensor, compute_dtype: torch.dtype, multiple: int = 1) -> None:
        self.sizes: list[int] = counts.tolist()
        self.compute_dtype = compute_dtype
        self.multiple = multiple

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e^T; see ``Products``."""
        return self._rowwise(rows, weight.mT)

    def input_grad(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Computes rows_e @ weight_e; see ``Products``."""
        return self._rowwise(rows, weight)

    def weight_grad(self, left: Tensor, right: Tensor) -> Tensor:
        """Computes left_e^T @ right_e; see ``Products``."""
        output = left.new_empty(len(self.sizes), left.shape[1], right.shape[1])
        for grad, own_left, own_right in zip(output, self._split(left), self._split(right), strict=True):
            self._product(self._filled(own_left).mT, self._filled(own_right), grad)  # the product of no rows is zero
        return output

    def bias_grad(self, rows: Tensor) -> Tensor:
        """Computes the sum of each expert's rows; see ``Products``."""
        sums = [own.sum(0, dtype=self.compute_dtype).to(rows.dtype) for own in self._split(rows)]
        return torch.stack(sums)

    def _rowwise(self, rows: Tensor, matrices: Tensor) -> Tensor:
        output = rows.new_empty(len(rows), matrices.shape[2])
        for out, own, matrix in zip(self._split(output), self._split(rows), matrices.unbind(0), strict=True):
            if len(own):
                self._product(self._filled(own), matrix, out)
        return output

    def _split(self, rows: Tensor) -> Iterator[Tensor]:
        return iter(rows.split(self.sizes))

    def _filled(self, own: Tensor) -> Tensor:
        missing = -len(own) % self.multiple
        return F.pad(own, (0, 0, 0, missing)) if missing else own

    def _product(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Writes the first rows of left @ right to ``out``. Padded rows are left out."""
        if out.dtype == self.compute_dtype and len(out) == len(left):
            torch.mm(left, right, out=out)
        else:
            out.copy_(torch.mm(left.to(self.compute_dtype), right.to(self.compute_dtype))[: len(out)])
