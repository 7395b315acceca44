"""The section ``m6.communication``: how the gradients of data parallelism travel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from m6.errors import UserError
from m6.validation import Section

Reducer = Literal["all_reduce", "top_k", "chunks", "powersgd"]
_KEYS: dict[str, set[str]] = {
    "all_reduce": set(),
    "top_k": {"density", "warmup_steps", "dense_elements"},
    "chunks": {"density", "warmup_steps", "dense_elements", "chunk_elements", "protected_layers"},
    "powersgd": {"rank", "warmup_steps", "dense_elements"},
}
_REQUIRED = {"top_k": "density", "chunks": "density", "powersgd": "rank"}


class CommunicationSettings(Section):
    """Sums of gradients over ranks with fewer bytes than an all-reduce. A rank keeps what it did not send, and adds it
    to its gradient of the next step. Experts that are split over ranks (ep_size above 1) are always summed whole."""

    gradients: Reducer = Field(
        "all_reduce",
        description="all_reduce: whole gradients; top_k: each rank sends its largest elements (RedSync, arXiv "
        "1808.04357); chunks: all ranks leave out the same chunks, those with the smallest norms (after DLCP, arXiv "
        "2008.08445); powersgd: matrices of low rank (arXiv 1905.13727)",
    )
    density: float | None = Field(
        None,
        gt=0,
        le=1,
        description="top_k, chunks: share of the elements, or of the chunks, that is sent; 1: all, as all_reduce. One "
        "minus this is the bound of the loss of chunks",
    )
    rank: PositiveInt | None = Field(None, description="powersgd: rank of the matrices that are sent")
    warmup_steps: int = Field(
        0,
        ge=0,
        description="top_k, chunks: steps in which the density falls exponentially from 1; powersgd: steps in which "
        "gradients are sent whole",
    )
    dense_elements: int = Field(
        32768, ge=0, description="smaller tensors are sent whole; so are biases and norms of any size"
    )
    chunk_elements: PositiveInt = Field(256, description="chunks: elements of one")
    protected_layers: int = Field(
        1, ge=0, description="chunks: first layers that are sent whole; the embeddings are the first of them"
    )

    @property
    def compresses(self) -> bool:
        """Whether ranks leave out parts of their gradients."""
        return self.gradients != "all_reduce"

    def density_of(self, step: int) -> float:
        """Share of the elements that is sent in the step after ``step`` steps; 1: everything."""
        if self.density is None:
            return 1.0 if step < self.warmup_steps else 0.0
        return float(self.density ** min(1.0, step / self.warmup_steps)) if self.warmup_steps else self.density

    def check(self) -> None:
        """Raises UserError for a key that the reducer lacks or would ignore."""
        name = f'm6.communication.gradients "{self.gradients}"'
        for key in sorted(self.model_fields_set - {"gradients"} - _KEYS[self.gradients]):
            owners = ", ".join(f'"{reducer}"' for reducer, keys in _KEYS.items() if key in keys)
            raise UserError(f"m6.communication.{key}: {name} would ignore it; it belongs to {owners}")
        if not self.compresses:
            return
        if getattr(self, required := _REQUIRED[self.gradients]) is None:
            raise UserError(f"m6.communication.{required}: missing; {name} needs it")
