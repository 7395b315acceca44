"""Cuts micro-batches into slices of tokens. The slices pass through a pipeline one after the other."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from m6.architecture.settings import ModelSettings
from m6.architecture.special_tokens import IGNORED_LABEL, IMAGE
from m6.data.collate import MicroBatch

# Odd, also its lower half, like the stride of the layers (m6/model/blocks.py).
_SEED_STRIDE = 0xD1B54A32D192ED03


@dataclass(frozen=True)
class Slice:
    """The tokens ``[begin, end)`` of all rows of a micro-batch.

    Attributes:
        batch: the tensors of the slice, see ``cut``.
        number: of the micro-batch in the step.
        begin: the number of tokens of each row before the slice.
        seed: for dropout.
    """

    batch: MicroBatch
    number: int
    begin: int
    seed: int


def slices_of(batch: MicroBatch, number: int, seed: int, cuts: list[int], model: ModelSettings) -> list[Slice]:
    """Returns the slices of a micro-batch in the order of its tokens.

    Args:
        batch: on the CPU.
        number: of the micro-batch in the step.
        seed: of the micro-batch. The first slice keeps it.
        cuts: increasing positions, see ``legal_cuts``.
    """
    bounds = [0, *cuts, batch.input_ids.shape[1]]
    return [
        Slice(cut(batch, begin, end, model), number, begin, (seed + begin * _SEED_STRIDE) % 2**63)
        for begin, end in itertools.pairwise(bounds)
    ]


def cut(batch: MicroBatch, begin: int, end: int, model: ModelSettings) -> MicroBatch:
    """Cuts the tokens ``[begin, end)`` of all rows out of a micro-batch.

    Returns:
        ``sample_ids`` of all tokens up to ``end``: [B, end]. ``labels`` and the ids of targets: [B, end - begin + 1],
        or one less at the end of the rows. A token is predicted from the token before it, so the last token of a slice
        predicts the first token behind the slice. The other tensors have the slice's tokens and images. Counts are
        still those of the whole micro-batch.
    """
    own, labelled = slice(begin, end), slice(begin, end + 1)
    labels = batch.labels[:, labelled]
    if begin > 0:  # the previous slice predicts the first label
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
    """Returns the images with placeholders in the slice. No legal cut is inside an image."""
    is_patch = (batch.input_ids == model.image_token_id) & (batch.token_type_ids == IMAGE)
    places = torch.nonzero(is_patch)[:, 1][:: model.num_patches]
    return batch.pixel_values[(places >= begin) & (places < end)]
