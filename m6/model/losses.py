"""The losses of targets: a text token competes with the joint vocabulary, an image code with its own codebook.

The places of image codes and their codebooks are fixed, and generation chooses nothing else there
(:mod:`m6.generation`). So a model need not learn them, nor compute the scores of all other tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from m6.architecture.settings import ModelSettings

ROWS_IN_CACHE = 64  # rows of logits per cross entropy on a CPU


def losses_of_states(hidden_states: Tensor, table: Tensor, targets: Tensor, config: ModelSettings) -> Tensor:
    """The loss of each target, [N] in at least fp32.

    Args:
        hidden_states: [N, D], the last hidden states before the targets.
        table: [V, D], the output matrix.
        targets: int64 [N], ids of the joint vocabulary.
    """
    return _losses(targets, config, lambda rows, tokens: F.linear(hidden_states[rows], table[tokens]))


def losses_of_logits(logits: Tensor, targets: Tensor, config: ModelSettings) -> Tensor:
    """The same as :func:`losses_of_states`, from the logits [N, V] of the whole joint vocabulary."""
    return _losses(targets, config, lambda rows, tokens: logits[rows][:, tokens])


def _losses(targets: Tensor, config: ModelSettings, logits_of: Callable[[Tensor | slice, slice], Tensor]) -> Tensor:
    first, size = config.first_code_id, max(1, config.codebook_size)
    books = (targets - first).div(size, rounding_mode="floor").clamp(min=-1)  # -1: text
    present: list[int] = books.unique().tolist()
    if not any(book >= 0 for book in present):
        return _cross_entropy(logits_of(slice(None), slice(None)), targets)
    places = [(books == book).nonzero().squeeze(1) for book in present]
    losses = []
    for book, rows in zip(present, places, strict=True):
        begin = 0 if book < 0 else first + book * size
        tokens = slice(begin, None if book < 0 else begin + size)
        losses.append(_cross_entropy(logits_of(rows, tokens), targets[rows] - begin))
    return torch.cat(losses)[torch.cat(places).argsort()]


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target, [N], from logits [N, V] and int64 [N], in at least fp32.

    A sum over a large vocabulary loses too much in 16 bits. A CPU takes a few rows at a time, so they stay in its
    cache.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    rows = ROWS_IN_CACHE if logits.device.type == "cpu" else max(1, len(logits))
    pieces = zip(logits.split(rows), targets.split(rows), strict=True)
    return torch.cat([F.cross_entropy(piece.to(precise), own, reduction="none") for piece, own in pieces])
