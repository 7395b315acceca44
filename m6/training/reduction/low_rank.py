"""Low-rank gradient compression: PyTorch's PowerSGD (arXiv 1905.13727)."""

from __future__ import annotations

import torch
from torch import Tensor

from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.messages import GradientTensor

_SEED = 0
# Added to the norm of a column of P: the norm is 0 if the gradient is 0.
_EPSILON = 1e-20


class LowRank:
    """Calls PyTorch 2.13's hook for ``DistributedDataParallel`` with a minimal bucket.

    The hook approximates the mean of the matrices M over ranks by P Q^T: P is the orthogonal basis of the sum of M Q, Q
    the mean of M^T P. Each step begins with the Q of the previous step. The error feedback of the hook stays off,
    because ``Reducer`` keeps the residual of every compressor: M - P Q^T.

    Args:
        tensors: descriptions of the gradients, in the order of ``waiting``.
        rank: columns of P and Q.
    """

    def __init__(
        self, collectives: CountedCollectives, tensors: list[GradientTensor], rank: int, like: torch.Tensor
    ) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._collectives = collectives
        self._matrices = [tensor.matrices for tensor in tensors]
        # The hook takes matrices of equal shapes one after another; its factors then lie in the order of this list.
        self._order = sorted(range(len(tensors)), key=lambda index: self._matrices[index][1:])
        self._ranks = [min(rank, rows, columns) for _, rows, columns in self._matrices]
        # PyTorch demands two plain steps, for the buckets of DistributedDataParallel. Here they are skipped.
        self._state = PowerSGDState(
            collectives.group,
            rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            use_error_feedback=False,
            warm_start=True,
            orthogonalization_epsilon=_EPSILON,
        )
        self._state.iter = self._state.start_powerSGD_iter
        sizes = list(zip(self._matrices, self._ranks, strict=True))
        p = sum(number * rows * rank for (number, rows, _), rank in sizes)
        q = sum(number * columns * rank for (number, _, columns), rank in sizes)
        generator = torch.Generator().manual_seed(_SEED)
        first = torch.randn(q, generator=generator, dtype=torch.float64)
        self._state.p_memory_dict[0] = torch.empty(p, device=like.device, dtype=like.dtype)
        self._first = first.to(like.device, like.dtype)
        self._state.q_memory_dict[0] = self._first.clone()

    def factors(self) -> list[Tensor]:
        """Returns the Q of each tensor for the next step, [matrices, columns, rank]. It is equal on all ranks."""
        return self._divided(self._state.q_memory_dict[0])

    def _divided(self, q: Tensor) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        begin = 0
        for index in self._order:
            (number, _, columns), rank = self._matrices[index], self._ranks[index]
            numel = number * columns * rank
            found[index] = q[begin : begin + numel].view(number, columns, rank)
            begin += numel
        return [found[index] for index in range(len(found))]

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """See ``Compressor``; the density has no effect."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        flat = torch.cat([waiting[index].reshape(-1) for index in self._order])
        parts = flat.split([waiting[index].numel() for index in self._order])
        matrices = [
            matrix
            for index, part in zip(self._order, parts, strict=True)
            for matrix in part.view(self._matrices[index])
        ]
        # A gradient of 0 leaves columns of 0 in Q. They would stay 0 forever, so they start anew.
        for factors, first in zip(self.factors(), self._divided(self._first), strict=True):
            factors.copy_(torch.where(factors.any(dim=1, keepdim=True), factors, first))
        powerSGD_hook(self._state, _Bucket(flat, matrices)).wait()  # type: ignore[arg-type]
        for memory in (self._state.p_memory_dict[0], self._state.q_memory_dict[0]):
            self._collectives.count_all_reduce(memory)
        sums: dict[int, Tensor] = {}
        for index, mean in zip(self._order, parts, strict=True):
            tensor = waiting[index]
            tensor.sub_(mean.view_as(tensor))
            sums[index] = mean.view_as(tensor) * self._collectives.ranks
        return [sums[index] for index in range(len(waiting))]


class _Bucket:
    """The hook's part of the interface of ``GradBucket``."""

    def __init__(self, flat: Tensor, matrices: list[Tensor]) -> None:
        self._flat, self._matrices = flat, matrices

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._matrices

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True
