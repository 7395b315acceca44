"""Corruption of token sequences for denoising objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from m6.tokenizers.text import M6Tokenizer


def mask_spans(
    ids: list[int], rng: np.random.Generator, *, mask_ratio: float, mean_span_length: float, mask_id: int
) -> list[int]:
    """Replaces random spans by one ``mask_id`` each, as BART's text infilling (arXiv 1910.13461) does.

    Exactly ``round(mask_ratio * len(ids))`` ids are removed, at least one. At least one id remains between two masks.

    Args:
        ids: token ids.
        rng: source of randomness.
        mask_ratio: share of the ids that are removed.
        mean_span_length: span lengths are 1 + Poisson(mean_span_length - 1).
        mask_id: id of ``<mask>``.
    """
    budget = max(1, round(mask_ratio * len(ids)))
    num_kept = len(ids) - budget
    ends = np.minimum(np.cumsum(1 + rng.poisson(mean_span_length - 1, size=budget)), budget)
    # As many spans as fill the budget, but no more than there are gaps between kept ids. The last span is lengthened
    # or cut so that the sum of the lengths is the budget.
    num_spans = min(int(np.searchsorted(ends, budget)) + 1, num_kept + 1)
    lengths = np.diff(ends[:num_spans], prepend=0)
    lengths[-1] += budget - lengths.sum()
    # Distinct gaps between kept ids: two spans in one gap would put two masks next to each other.
    gaps = np.sort(rng.choice(num_kept + 1, size=num_spans, replace=False))
    masked, position = [], 0
    for num_between, length in zip(np.diff(gaps, prepend=0).tolist(), lengths.tolist(), strict=True):
        masked += [*ids[position : position + num_between], mask_id]
        position += num_between + length
    return masked + ids[position:]


def shuffle_sentences(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer) -> list[int]:
    """Returns the ids with their sentences in random order."""
    sentences = tokenizer.split_sentence_ids(ids)
    return [token for index in rng.permutation(len(sentences)).tolist() for token in sentences[index]]


def mask_randomly(ids: list[int], rng: np.random.Generator, *, share: float, mask_id: int) -> list[int]:
    """Replaces each id by ``mask_id`` with probability ``share``; the length stays the same."""
    return np.where(rng.random(len(ids)) < share, mask_id, ids).tolist()


def hide_randomly(ids: list[int], rng: np.random.Generator, *, share: float, mask_id: int) -> list[int]:
    """Replaces ``round(share * len(ids))`` random ids by ``mask_id``, at least one; the length stays the same."""
    hidden = rng.choice(len(ids), size=max(1, round(share * len(ids))), replace=False)
    masked = np.array(ids)
    masked[hidden] = mask_id
    return masked.tolist()
