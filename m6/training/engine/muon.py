"""Muon: each update is the momentum of a matrix made orthogonal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from m6.training.engine.matrices import MatrixLayout, complete_cuts
from m6.training.optimizers import MUON_BATCH_ELEMENTS, MUON_ITERATIONS

# The polynomial a x + b x^3 + c x^5 moves singular values between 0 and 1 towards 1 (Jordan et al. 2024,
# https://kellerjordan.github.io/posts/muon/).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class Muon(torch.optim.AdamW):
    """Muon (Jordan et al. 2024) for the matrices of blocks, AdamW for all other parameters.

    A gradient G moves the momentum B to mu B + (1 - mu) G. The update is approximately the orthogonal matrix nearest to
    mu B + (1 - mu) G, times 0.2 sqrt(max(rows, columns)). This factor gives it the root mean square of AdamW's updates,
    so both share learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982, section 2.2). Each matrix of a
    stack, such as an expert's, is updated separately.

    Attributes:
        layouts: the positions of matrices in each tensor of the parameter groups with a true value ``muon``. ZeRO
            replaces the parameters of a group by one flat partition; the layouts are then replaced, too.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        layouts: Mapping[Tensor, MatrixLayout],
        momentum: float,
        dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """Makes the optimizer.

        Args:
            momentum: mu.
            dtype: of the matrix products of the orthogonalization.
            options: of AdamW; ``fused`` is True by default.
        """
        super().__init__(groups, **{"fused": True, **options})
        self.layouts = layouts
        self._momentum, self._dtype = momentum, dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes a saved state. AdamW sees only its own groups, because it expects a step counter of each parameter."""
        groups = state["param_groups"]
        super().__setstate__(state | {"param_groups": [group for group in groups if not group.get("muon")]})
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters. Gradients of the groups with ``muon`` are overwritten."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group.get("muon")]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            for parameter in group["params"] if group.get("muon") else ():
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        directions = gradient.lerp_(momentum, self._momentum).view(-1)
        weights = parameter.view(-1)
        weights.mul_(1 - lr * weight_decay)
        layout = self.layouts[parameter]
        for run in layout.whole:
            for start, end in run.batches(MUON_BATCH_ELEMENTS):
                update = run.kind.map(self._orthogonal, directions[start:end].to(layout.device))
                weights[start:end].sub_(update.to(weights.device), alpha=lr * _scale(run.kind.shape))
        for cut, update in complete_cuts(layout, directions, self._orthogonal):
            weights[cut.local].sub_(update, alpha=lr * _scale(cut.kind.shape))

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        # A shard may belong to more matrices than a batch has.
        at_once = max(1, MUON_BATCH_ELEMENTS // (matrices.shape[1] * matrices.shape[2]))
        batches = [orthogonal(batch, self._dtype) for batch in matrices.split(at_once)]
        return batches[0] if len(batches) == 1 else torch.cat(batches)


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Moves the singular values of each matrix of [N, R, C] to about 1.

    Singular values far below the largest one of their matrix stay below 1.

    Args:
        dtype: of the matrix products.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # the products below are smaller with fewer rows than columns
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)).to(dtype)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def _scale(shape: tuple[int, int]) -> float:
    return 0.2 * max(shape) ** 0.5
