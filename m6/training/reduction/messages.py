"""The gradients compressed by ``m6.communication``, and the bytes sent for them by a rank, as closed forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from m6.config.communication import CommunicationSettings
from m6.training.sizes import FP32

INDEX_BYTES = 4
BUCKET_ELEMENTS = 1 << 23
"""Elements that engines which sum gradients themselves exchange at once."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class GradientTensor:
    """A gradient common to all ranks.

    Attributes:
        shape: [E, rows, columns] of a stack of experts, [rows, columns] of a matrix.
        layer: its layer, from 1 on; 0: the embeddings.
        is_stack: whether the first dimension counts experts.
    """

    shape: Shape
    layer: int
    is_stack: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """(number, rows, columns) of its matrices."""
        number = self.shape[0] if self.is_stack else 1
        rows, *columns = self.shape[1:] if self.is_stack else self.shape
        return number, rows, math.prod(columns)


def is_compressed(tensor: GradientTensor, settings: CommunicationSettings) -> bool:
    """Whether the reducer of the run compresses this gradient.

    Small tensors are sent whole, as in RedSync (arXiv 1808.04357) and PowerSGD (arXiv 1905.13727); so are biases and
    norms. "chunks" also sends the first layers whole: DLCP (arXiv 2008.08445) gives their packets priority.
    """
    if settings.gradients == "all_reduce" or len(tensor.shape) - tensor.is_stack < 2:
        return False
    if settings.gradients == "chunks" and tensor.layer < settings.protected_layers:
        return False
    if settings.gradients == "powersgd" and not saves_at_rank(tensor, settings.rank or 0):
        return False
    return tensor.numel >= settings.dense_elements


def saves_at_rank(tensor: GradientTensor, rank: int) -> bool:
    """Whether the two factors of each matrix have fewer elements than the matrix."""
    _, rows, columns = tensor.matrices
    return min(rank, rows, columns) * (rows + columns) < rows * columns


def kept_count(numel: int, density: float) -> int:
    """The number of elements or chunks sent, out of ``numel``; at least one."""
    return max(1, math.ceil(numel * density))


def ring_bytes(num_bytes: int, ranks: int) -> float:
    """Bytes sent by a rank in a ring all-reduce of ``num_bytes``."""
    return 2 * num_bytes * (ranks - 1) / ranks


def gathered_bytes(num_bytes: int, ranks: int) -> int:
    """Bytes sent by a rank in an all-gather with ``num_bytes`` from each rank."""
    return num_bytes * (ranks - 1)


def sends_whole(settings: CommunicationSettings, density: float, ranks: int) -> bool:
    """Whether a step sends whole gradients: at density 1, and where whole gradients take no more bytes.

    A sparse element costs an index and a value for each other rank. So top-k saves bytes below a density of 1 / ranks.
    """
    return ranks == 1 or density >= 1 or (settings.gradients == "top_k" and density * ranks >= 1)


@dataclass(frozen=True)
class Messages:
    """The messages of a rank in one step for gradients common to all ranks.

    Attributes:
        all_reduced: bytes of its all-reduces.
        gathered: bytes of its contributions to all-gathers.
    """

    all_reduced: int
    gathered: int = 0

    def sent_bytes(self, ranks: int) -> float:
        """Bytes sent by each of ``ranks`` ranks."""
        return ring_bytes(self.all_reduced, ranks) + gathered_bytes(self.gathered, ranks)


def messages(
    tensors: Sequence[GradientTensor], settings: CommunicationSettings, density: float, ranks: int
) -> Messages:
    """The messages of a step by the run's reducer.

    Args:
        density: of the step, see ``CommunicationSettings.density_of``.
    """
    if sends_whole(settings, density, ranks):
        return Messages(sum(tensor.numel for tensor in tensors) * FP32)
    whole = sum(tensor.numel for tensor in tensors if not is_compressed(tensor, settings))
    compressed = [tensor for tensor in tensors if is_compressed(tensor, settings)]
    if settings.gradients == "top_k":
        kept = sum(kept_count(tensor.numel, density) for tensor in compressed)
        return Messages(whole * FP32, kept * (INDEX_BYTES + FP32))
    if settings.gradients == "chunks":
        chunks = sum(math.ceil(tensor.numel / settings.chunk_elements) for tensor in compressed)
        kept = kept_count(chunks, density) if chunks else 0
        return Messages((whole + chunks + kept * settings.chunk_elements) * FP32)
    factors = 0
    for tensor in compressed:
        number, rows, columns = tensor.matrices
        factors += number * min(settings.rank or 0, rows, columns) * (rows + columns)
    return Messages((whole + factors) * FP32)


def sent_bytes(tensors: Sequence[GradientTensor], settings: CommunicationSettings, density: float, ranks: int) -> float:
    """Bytes sent by a rank in one step, see ``messages``."""
    return messages(tensors, settings, density, ranks).sent_bytes(ranks)
