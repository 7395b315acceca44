"""Residuals (unsent gradients) in checkpoints. Each rank has its own kind of fragment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from m6.checkpoints.format import Fragment, WeightReader
from m6.errors import UserError

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
