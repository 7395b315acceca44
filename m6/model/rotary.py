"""Rotary positions: queries and keys are rotated by their position in the row, so scores depend on distances."""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the angles, each [S, size / 2] in fp64."""


def rotation_of(index: Tensor, size: int, base: float) -> Rotation:
    """The angles of positions (Su et al. 2021, arXiv 2104.09864, equation 15).

    Args:
        index: int64 [S], positions in the row, or in the cache.
        size: of a head.
        base: pair i of a head's ``size / 2`` pairs turns by ``base ** (-2 i / size)`` radians per position.
    """
    # In fp64, so scores at the same distance are equal wherever a row begins.
    frequencies = base ** (-torch.arange(0, size, 2, device=index.device, dtype=torch.float64) / size)
    angles = index.unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotates queries or keys [B, H, S, size]. A pair is element i of the first half with element i of the second."""
    cosines, sines = (part.to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
