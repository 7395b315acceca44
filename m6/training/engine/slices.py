"""Cuts micro-batches into slices of tokens, which pass a pipeline one after the other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from m6.architecture.settings import ModelSettings
from m6.architecture.special_tokens import IGNORED_LABEL, IMAGE
from m6.data.collate import MicroBatch

# Odd, and its low half too, as that of the layers (m6/model/blocks.py).
_SEED_STRIDE = 0xD1B54A32D192ED03


@dataclass(frozen=True)
class Slice:
    """The tokens ``[begin, end)`` of all rows of a micro-batch.

    Attributes:
        batch: its tensors, see ``cut``.
        number: of the micro-batch in the step.
        begin: tokens of each row before it.
        seed: for dropout.
    """

    batch: MicroBatch
    number: int
    begin: int
    seed: int


def slices_of(batch: MicroBatch, number: int, seed: int, cuts: list[int], model: ModelSettings) -> list[Slice]:
    """The slices of a micro-batch in the order of its tokens.

    Args:
        batch: on the CPU.
        number: of the micro-batch in the step.
        seed: of the micro-batch. A slice that begins at 0 keeps it.
        cuts: increasing places, see ``legal_cuts``.
    """
    bounds = [0, *cuts, batch.input_ids.shape[1]]
    return [
        Slice(cut(batch, begin, end, model), number, begin, (seed + begin * _SEED_STRIDE) % 2**63)
        for begin, end in itertools.pairwise(bounds)
    ]


def cut(batch: MicroBatch, begin: int, end: int, model: ModelSettings) -> MicroBatch:
    """The tokens ``[begin, end)`` of all rows.

    Returns:
        ``sample_ids`` of all tokens up to ``end``: [B, end]. ``labels`` and what belongs to them [B, end - begin + 1],
        or one less at the end of the rows: a token is predicted from the one before it, so a slice's last token
        predicts the first one behind it. The other tensors have the slice's tokens and pictures. Counts stay those of
        the whole.
    """
    own, labelled = slice(begin, end), slice(begin, end + 1)
    labels = batch.labels[:, labelled]
    if begin > 0:  # its first label was that of the slice before
        labels = labels.clone()
        labels[:, 0] = IGNORED_LABEL
    return replace(
        batch,
        input_ids=batch.input_ids[:, own],
        token_type_ids=batch.token_type_ids[:, own],
        position_ids=batch.position_ids[:, own],
        sample_ids=batch.sample_ids[:, :end],
        labels=labels,
        objective_ids=batch.objective_ids[:, labelled],
        data_source_ids=batch.data_source_ids[:, labelled],
        pixel_values=_pictures(batch, begin, end, model),
    )


def _pictures(batch: MicroBatch, begin: int, end: int, model: ModelSettings) -> Tensor:
    """The pictures whose placeholders are in a slice: no legal cut is inside of one."""
    is_patch = (batch.input_ids == model.image_token_id) & (batch.token_type_ids == IMAGE)
    places = torch.nonzero(is_patch)[:, 1][:: model.num_patches]
    return batch.pixel_values[(places >= begin) & (places < end)]
