"""Sums compressed gradients over ranks, with error feedback: a rank sends the unsent rest in later steps.

Three ways to send fewer bytes:

- ``TopK`` sends the largest elements of each gradient, as pairs of index and value (RedSync, arXiv 1808.04357).
- ``Chunks`` leaves out the chunks of gradients with the smallest norms (after DLCP, arXiv 2008.08445).
- ``LowRank`` sends two factors of each matrix: PyTorch's PowerSGD (arXiv 1905.13727).

In DLCP, switches drop packets of small gradients up to a bound, and a sum is divided by the number of packets received.
Networks of training clusters lose no packets, so here the ranks agree on the chunks to leave out. A sum then has the
terms of all ranks or of none, and is divided by the number of ranks. A step leaves out at most the share 1 - density of
the chunks. The rest is kept for the next step; in DLCP it is lost. In the experiments of
scripts/experiments/gradient_bytes/README.md the losses of both variants are equal within the spread of seeds. A third
variant, in which all ranks lose the same chunks, is worse at densities of 30 and 50 %.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from m6.checkpoints.format import Fragment, WeightReader
from m6.config.communication import CommunicationSettings
from m6.errors import UserError
from m6.training.reduction.collectives import CountedCollectives
from m6.training.reduction.messages import (
    GradientTensor,
    is_compressed,
    kept_count,
    ring_bytes,
    sends_whole,
    sent_bytes,
)

_KIND = "residual_"


def residual_fragments(residuals: Mapping[str, Tensor], rank: int) -> Iterator[Fragment]:
    """Yields this rank's residuals as fragments."""
    for name, residual in residuals.items():
        yield Fragment(name, f"{_KIND}{rank:05d}", 0, residual.view(-1), tuple(residual.shape))


def load_residuals(
    reader: WeightReader,
    residuals: Mapping[str, Tensor],
    rank: int,
    world_size: int,
    kept: Collection[str] = (),
) -> None:
    """Fills the residuals of this rank from a checkpoint. Their sum over all ranks is the same as in the checkpoint.

    With fewer ranks, a rank gets the sum of several residuals. With more ranks, some residuals begin at 0. Without
    residuals in the checkpoint all are 0.

    Args:
        rank, world_size: among the ranks with the same part of the model.
        kept: names of the residuals of all ranks, including other pipeline stages.

    Raises:
        UserError: the checkpoint has a non-zero residual, and this run has no residual of this name.
    """
    kinds: dict[str, list[str]] = {}
    for name, kind in reader.shapes:
        if kind.startswith(_KIND):
            kinds.setdefault(name, []).append(kind)
    for name, stored in kinds.items():
        if name not in residuals and name not in kept and any(_read(reader, name, kind).any() for kind in stored):
            raise UserError(
                f"{reader.folder}: holds gradients of {name} that were not sent yet, and this run would lose them; go "
                "on with the m6.communication and m6.training.ep_size of the checkpoint, or first do a step that sends "
                'everything ("density": 1, or more warmup_steps of "powersgd")'
            )
    for name, residual in residuals.items():
        residual.zero_()
        for kind in sorted(kinds.get(name, [])):
            if int(kind.removeprefix(_KIND)) * world_size // len(kinds[name]) == rank:
                residual.add_(_read(reader, name, kind).view_as(residual).to(residual.device))


def _read(reader: WeightReader, name: str, kind: str) -> Tensor:
    stored = torch.empty(torch.Size(reader.shapes[name, kind]).numel())
    reader.read_into(name, kind, 0, stored)
    return stored


_MAX_ELEMENTS = 2**31 - 1  # indices are sent as int32
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


class TopK:
    """Each rank chooses its own elements. An all-gather collects the messages; every rank adds them in rank order."""

    def __init__(self, collectives: CountedCollectives) -> None:
        self._collectives = collectives

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """See ``Compressor``."""
        indices, values = [], []
        for tensor in waiting:
            if tensor.numel() > _MAX_ELEMENTS:
                raise ValueError(f"a gradient of {tensor.numel()} elements: their indices do not fit into 32 bits")
            flat = tensor.view(-1)
            chosen = flat.abs().topk(kept_count(flat.numel(), density), sorted=False).indices
            indices.append(chosen.int())
            values.append(flat[chosen])
            flat[chosen] = 0
        counts = [len(chosen) for chosen in indices]
        all_indices = [each.split(counts) for each in self._collectives.all_gather(torch.cat(indices))]
        all_values = [each.split(counts) for each in self._collectives.all_gather(torch.cat(values))]
        sums = [torch.zeros_like(tensor) for tensor in waiting]
        for number, total in enumerate(sums):
            # One rank after the other, for a fixed order of additions: a rank's message has each index at most once.
            for index, value in zip(all_indices, all_values, strict=True):
                total.view(-1).index_add_(0, index[number], value[number])
        return sums


class Chunks:
    """All ranks send the same chunks, so an all-reduce without indices is enough.

    Chunks are ordered by the sum of their squared norms over the ranks. This takes an all-reduce of one number for each
    chunk.

    Args:
        size: elements of a chunk. The last chunk of a tensor is padded with zeros.
    """

    def __init__(self, collectives: CountedCollectives, size: int) -> None:
        self._collectives, self._size = collectives, size

    def __call__(self, waiting: list[Tensor], density: float) -> list[Tensor]:
        """See ``Compressor``."""
        chunks = torch.cat([self._cut(tensor) for tensor in waiting])
        norms = chunks.square().sum(dim=1)
        self._collectives.all_reduce(norms)
        chosen = norms.topk(kept_count(len(chunks), density), sorted=False).indices
        sent = chunks[chosen]
        self._collectives.all_reduce(sent)
        sums = torch.zeros_like(chunks)
        sums[chosen], chunks[chosen] = sent, 0
        for tensor, rest in zip(waiting, self._joined(chunks, waiting), strict=True):
            tensor.copy_(rest)
        return self._joined(sums, waiting)

    def _cut(self, tensor: Tensor) -> Tensor:
        """Cuts a tensor into chunks [C, size], padded with zeros."""
        flat = tensor.view(-1)
        return nn.functional.pad(flat, (0, -len(flat) % self._size)).view(-1, self._size)

    def _joined(self, chunks: Tensor, like: list[Tensor]) -> list[Tensor]:
        """Returns tensors with the shapes of ``like`` from the chunks of all of them."""
        parts = chunks.split([-(-tensor.numel() // self._size) for tensor in like])
        return [part.view(-1)[: each.numel()].view_as(each) for part, each in zip(parts, like, strict=True)]


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
            self._collectives.count_ring(ring_bytes(memory.nbytes, self._collectives.ranks))
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
