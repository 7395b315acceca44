"""The matrix of Muon's update: momentum with all singular values near one."""

from __future__ import annotations

import torch
from torch import Tensor

from offload.optimizer.settings import MUON_ITERATIONS

# The polynomial a x + b x^3 + c x^5 moves singular values between 0 and 1 towards 1 (Jordan et al. 2024,
# https://kellerjordan.github.io/posts/muon/).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Moves the singular values of each matrix of [N, R, C] to about 1.

    Singular values far below the largest one of their matrix stay below 1.

    Args:
        dtype: of the matrix products.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the products below are smaller with fewer rows than columns
    # On CPUs PyTorch 2.13 adds the squares of fp32 numbers in fp32, so the norm of a large matrix is too small.
    wide = torch.float64 if matrices.device.type == "cpu" else torch.float32
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True, dtype=wide).to(matrices.dtype)
    x = (x / norms.clamp(min=_EPS)).to(dtype)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def update_scale(shape: tuple[int, int]) -> float:
    """Returns the factor of an orthogonal update with the root mean square of AdamW's (arXiv 2502.16982, 2.2)."""
    return 0.2 * max(shape) ** 0.5
