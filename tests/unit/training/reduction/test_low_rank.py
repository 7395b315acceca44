"""PowerSGD of gradients that are 0 for a while: of experts without tokens, of the patch encoder without pictures."""

import pytest
import torch

from m6.runs.processes import Runtime
from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.messages import GradientTensor
from m6.training.reduction.reducer import LowRank

SHAPE = (12, 8)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1])
def test_a_matrix_that_was_zero_is_sent_when_it_is_not(runtime: Runtime, rank: int, rows: int):
    """Of a matrix with fewer rows than 0 than its rank, columns of P are 0, too."""
    torch.manual_seed(0)
    compressor = LowRank(CountedCollectives(), [GradientTensor(SHAPE, 1, False)] * 2, rank, torch.zeros(()))
    for step in range(40):
        residuals = [torch.randn(SHAPE), torch.randn(SHAPE) if step >= 3 else torch.zeros(SHAPE)]
        residuals[1][0] += rows
        before = [each.clone() for each in residuals]
        sums = compressor(residuals, 1.0)
        for kept, sent, given in zip(residuals, sums, before, strict=True):
            assert torch.isfinite(sent).all()
            assert torch.allclose(kept + sent, given, atol=1e-5)  # rounding of numbers below 4
        assert bool(sums[1].any()) == (step >= 3 or rows > 0)
    # The best matrix of this rank is an orthogonal projection, and any projection leaves no more than there was.
    assert all(each.norm() < given.norm() for each, given in zip(residuals, before, strict=True))
