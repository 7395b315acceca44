"""Plans: the chunks owned by the device, and the chunks kept on it from one use to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.memory.layout import ChunkBytes
from offload.plan.trace import Trace


@dataclass(frozen=True)
class PlacementConstraints:
    """Decisions of the user, as numbers of chunks.

    Attributes:
        owned: the device has to own these chunks.
        streamed: the device must not own these chunks.
        fetched: the device must not own these chunks, and has to drop them after each use.
    """

    owned: frozenset[int] = frozenset()
    streamed: frozenset[int] = frozenset()
    fetched: frozenset[int] = frozenset()

    @property
    def never_owned(self) -> frozenset[int]:
        """The chunks excluded from ownership by the device."""
        return self.streamed | self.fetched


@dataclass(frozen=True)
class PlacementPlan:
    """Where chunks are during a step.

    Attributes:
        trace: the planned step.
        owned: numbers of the chunks owned by the device: their weights, gradients and optimizer state never move.
        keep: for each moment of the trace, whether its chunk stays on the device until its next use.
        upload_bytes, download_bytes: bytes moved in each step.
        bound_bytes: a lower bound of ``moved_bytes`` for any plan: the optimum of the linear programme.
        prefetch_depth: how many uses ahead an upload starts.
    """

    trace: Trace
    owned: frozenset[int]
    keep: tuple[bool, ...]
    upload_bytes: int
    download_bytes: int
    bound_bytes: float
    prefetch_depth: int

    def fetches(self) -> list[bool]:
        """Returns for each moment whether its chunk has to be uploaded."""
        resident: set[int] = set()
        fetches = []
        for moment, keeps in zip(self.trace.moments, self.keep, strict=True):
            fetches.append(moment.chunk not in self.owned and moment.chunk not in resident)
            (resident.add if keeps else resident.discard)(moment.chunk)
        return fetches

    def resident_bytes(self, sizes: Sequence[ChunkBytes]) -> list[int]:
        """Returns the bytes of all owned, kept and used chunks at each moment, without prefetched ones."""
        owned_bytes = sum(sizes[chunk].owned for chunk in self.owned)
        resident: set[int] = set()
        totals = []
        for moment, keeps in zip(self.trace.moments, self.keep, strict=True):
            present = (resident | {moment.chunk, *moment.pinned}) - self.owned
            totals.append(owned_bytes + sum(sizes[chunk].weight for chunk in present))
            (resident.add if keeps else resident.discard)(moment.chunk)
        return totals

    @property
    def moved_bytes(self) -> int:
        """Uploads and downloads of each step."""
        return self.upload_bytes + self.download_bytes
