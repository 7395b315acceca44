"""The sizes at which expert layers are measured, and what measuring them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# How many contestants of two and of three matrices there are at most.
NUM_PLAIN, NUM_GATED = 11, 5
# Those of two matrices with weights of their own, the floor with two sets; those of three.
NUM_PLAIN_COPIES, NUM_GATED_COPIES = 9, 4


@dataclass(frozen=True)
class Cell:
    """A size: T tokens of width d, hidden width 4 d, E experts in Z prototypes, top_k of each."""

    num_tokens: int
    hidden_size: int
    num_experts: int
    num_prototypes: int = 1
    top_k: int = 1

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def choices(self) -> int:
        return self.num_prototypes * self.top_k

    @property
    def rows_per_expert(self) -> float:
        return self.num_tokens * self.choices / self.num_experts

    @property
    def routing(self) -> str:
        return f"{self.num_prototypes} top-1" if self.num_prototypes > 1 else f"top-{self.top_k}"

    @property
    def has_quadratic(self) -> bool:
        """Whether those take part whose backward pass makes a gradient of the whole stack for every expert."""
        return self.num_experts <= 32

    def __str__(self) -> str:
        return f"T {self.num_tokens}, d {self.hidden_size}, E {self.num_experts}, {self.routing}"


SMALL = (
    Cell(2048, 256, 8),
    Cell(2048, 256, 64),
    Cell(2048, 256, 16, num_prototypes=2),
    Cell(2048, 256, 32, num_prototypes=4),
    Cell(4096, 256, 16),
    Cell(2048, 512, 8),
)
# Both ends of every axis: 2,048 and 16,384 tokens, widths 256 and 1,024, 8 and 512 experts, one and eight choices.
AXES = (
    *SMALL,
    Cell(2048, 256, 8, top_k=2),
    Cell(2048, 256, 64, num_prototypes=8),
    Cell(2048, 1024, 8),
    Cell(16384, 256, 8),
    Cell(8192, 256, 64, top_k=2),
    Cell(8192, 256, 128, num_prototypes=4),
    Cell(8192, 512, 64, num_prototypes=2),
    Cell(16384, 256, 512),
    Cell(2048, 256, 512, num_prototypes=8),
)
GRIDS = {"small": SMALL, "axes": AXES}
BFLOAT16 = (Cell(512, 256, 8), Cell(2048, 256, 32, num_prototypes=2), Cell(8192, 256, 16))


def round_seconds(cells: Sequence[Cell], flops_per_s: float = 90e9) -> float:
    """Matrix products of one round of all contestants: 6 FLOPs, forward and backward, for each weight a row meets."""
    matrices = 2 * NUM_PLAIN + 3 * NUM_GATED
    return sum(6 * matrices * c.num_tokens * c.choices * c.hidden_size * c.ffn_size for c in cells) / flops_per_s


def held_bytes(cell: Cell) -> int:
    """Memory of all contestants in float32, at most: weights, inputs, and what one step adds."""
    matrix = 4 * cell.num_experts * cell.hidden_size * cell.ffn_size
    row = 4 * cell.num_tokens * cell.choices * cell.hidden_size
    gated = NUM_GATED_COPIES if cell.has_quadratic else NUM_GATED_COPIES - 2
    weights = (2 * NUM_PLAIN_COPIES + 3 * gated) * matrix
    inputs = 2 * (NUM_PLAIN_COPIES + gated) * row
    # Gradients of three matrices and of the expert in turn; h, a and their gradients, twice for padded capacities.
    step = 2 * 3 * matrix + 2 * (4 * 3 + 4) * 2 * row
    return weights + inputs + step
