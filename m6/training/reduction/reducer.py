"""Sums compressed gradients over ranks, with error feedback: a rank sends the unsent rest in later steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from m6.config.communication import CommunicationSettings
from m6.training.reduction.chunks import Chunks
from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.low_rank import LowRank
from m6.training.reduction.messages import GradientTensor, is_compressed, sends_whole, sent_bytes
from m6.training.reduction.top_k import TopK

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Compressor(Protocol):
    """Sends a part of gradients."""

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """Returns the sums over ranks of the sent parts. ``waiting`` keeps this rank's unsent rest."""
        ...


class Reducer:
    """Sums the gradients of parameters common to all ranks, with error feedback.

    Sources: Seide et al. 2014; Karimireddy et al., arXiv 1901.09847.
    A rank adds its gradient to its residual, sends a part, and keeps the rest as the residual. Over any number of
    steps, all sent parts and the residuals of all ranks therefore add up to the sum of all gradients.

    Args:
        tensors: descriptions of the gradients by name, in order.
        like: a tensor of the type and device of the gradients.

    Attributes:
        residuals: this rank's unsent rest of each compressed gradient.
        has_residuals: whether any rank may have a non-zero residual; equal on all ranks.
    """

    def __init__(
        self,
        settings: CommunicationSettings,
        tensors: Mapping[str, GradientTensor],
        collectives: CountedCollectives,
        like: Tensor,
    ) -> None:
        self._settings, self._tensors, self._collectives = settings, dict(tensors), collectives
        compressed = [name for name, tensor in tensors.items() if is_compressed(tensor, settings)]
        self.residuals = {
            name: torch.zeros(tensors[name].shape, dtype=like.dtype, device=like.device) for name in compressed
        }
        self.has_residuals = False
        self._low_rank: LowRank | None = None
        self._compress: Compressor
        if settings.gradients == "top_k":
            self._compress = TopK(collectives)
        elif settings.gradients == "chunks":
            self._compress = Chunks(collectives, settings.chunk_elements)
        else:
            shapes = [tensors[name] for name in compressed]
            self._compress = self._low_rank = LowRank(collectives, shapes, settings.rank or 1, like)

    def __call__(self, gradients: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Returns the sums over ranks of gradients and residuals, or of the sent parts of them.

        Args:
            gradients: of this rank, by name.
            step: the number of steps before this one.
        """
        for name, residual in self.residuals.items():
            residual.add_(gradients[name])
        if self._sends_whole(step):
            found = self._sums({name: self.residuals.get(name, gradient) for name, gradient in gradients.items()})
            for residual in self.residuals.values():
                residual.zero_()
            self.has_residuals = False
            return found
        found = self._sums({name: gradient for name, gradient in gradients.items() if name not in self.residuals})
        sums = self._compress(list(self.residuals.values()), self._settings.density_of(step))
        self.has_residuals = True
        return found | dict(zip(self.residuals, sums, strict=True))

    def leaves_nothing_out(self, step: int) -> bool:
        """Whether the step after ``step`` steps sums exactly the gradients, without compression and residuals."""
        return self._sends_whole(step) and not self.has_residuals

    def _sends_whole(self, step: int) -> bool:
        density = self._settings.density_of(step)
        return not self.residuals or sends_whole(self._settings, density, self._collectives.ranks)

    def _sums(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(tensors, self._collectives.sums(list(tensors.values())), strict=True))

    def factors(self) -> dict[str, Tensor]:
        """Returns state common to all ranks, see ``LowRank.factors``."""
        if self._low_rank is None:
            return {}
        return dict(zip(self.residuals, self._low_rank.factors(), strict=True))

    def bytes_due(self, step: int) -> tuple[float, float]:
        """Returns the bytes sent by a rank in a step by the closed form, and the bytes of a plain all-reduce."""
        ranks, tensors = self._collectives.ranks, list(self._tensors.values())
        due = sent_bytes(tensors, self._settings, self._settings.density_of(step), ranks)
        return due, sent_bytes(tensors, self._settings, 1.0, ranks)


def gradient_tensor(name: str, parameter: nn.Parameter) -> GradientTensor:
    """Describes the gradient of a parameter of the model."""
    match = _LAYER.search(name)
    layer = 1 + int(match[1]) if match else 0
    return GradientTensor(tuple(parameter.shape), layer, hasattr(parameter, "num_global_experts"))
