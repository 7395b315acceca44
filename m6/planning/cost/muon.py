"""The cost of the optimizer Muon: its products and its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from m6.planning.cost.layout import ParallelLayout
from m6.planning.cost.precision import FP32
from m6.planning.cost.work import Matmul

MUON_ITERATIONS = 5
"""Iterations that make a matrix orthogonal."""
MUON_BATCH_ELEMENTS = 1 << 24
"""Elements of matrices that are made orthogonal at once, unless one matrix has more: it bounds the temporaries."""


@dataclass(frozen=True)
class MuonMatrices:
    """Equal matrices on one rank, before ZeRO partitions them.

    Attributes:
        number: how many.
        in_parameter: how many of them are in one parameter.
        rows, columns: of each.
        of_experts: whether they belong to experts with groups of ranks of their own.
        parts: ranks of a tensor group, each with a part of each parameter; each rank updates whole matrices.
    """

    number: int
    in_parameter: int
    rows: int
    columns: int
    of_experts: bool
    parts: int = 1

    @property
    def numel(self) -> int:
        """Elements of all of them on this rank."""
        return self.number * self.rows * self.columns // self.parts

    def products(self, dtype: str) -> list[Matmul]:
        """The products of one update of one matrix."""
        short, long = sorted((self.rows, self.columns))
        shapes = ((short, short, long), (short, short, short), (short, long, short))
        return [Matmul(m, n, k, dtype, MUON_ITERATIONS) for m, n, k in shapes]

    def temporaries(self, width: int) -> int:
        """Bytes of the largest batch's temporaries; ``width``: bytes of an element in products."""
        short, long = sorted((self.rows, self.columns))
        at_once = min(self.in_parameter, max(1, MUON_BATCH_ELEMENTS // (short * long)))
        # The normed matrix in fp32, before and after a product in ``width``, and two products of it with itself.
        products = at_once * (short * long * (FP32 + 2 * width) + 2 * short * short * width)
        # In tensor groups also the whole parameter, as it comes, in order and after the products.
        return products + (3 * self.in_parameter * short * long * FP32 if self.parts > 1 else 0)


def muon_products_s(
    matrices: Iterable[MuonMatrices], layout: ParallelLayout, dtype: str, matmul_s: Callable[[Matmul], float]
) -> float:
    """Seconds of the products of a step. ZeRO stages 1 and 2 divide them over ranks together with the partitions.

    They belong to the update: its measured factor includes them.
    """
    seconds = 0.0
    for part in matrices:
        replicas = layout.expert_copies if part.of_experts else layout.dp_size
        share = part.number / (replicas if layout.zero_stage > 0 else 1)
        seconds += share * sum(matmul_s(product) for product in part.products(dtype))
    return seconds
