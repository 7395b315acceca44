"""What is taken from sequences before a model sees them."""

import numpy as np

from m6.tokenizers.text import M6Tokenizer


def mask_spans(
    ids: list[int], rng: np.random.Generator, *, mask_ratio: float, mean_span_length: float, mask_id: int
) -> list[int]:
    """Replaces random spans by one ``mask_id`` each.

    Exactly ``round(mask_ratio * len(ids))`` ids disappear, but at least one; no two masks are neighbours.
    """
    budget = max(1, round(mask_ratio * len(ids)))
    num_kept = len(ids) - budget
    ends = np.minimum(np.cumsum(1 + rng.poisson(mean_span_length - 1, size=budget)), budget)
    # The spans that fill the budget; were there more than places between kept ids, the last takes what is left.
    num_spans = min(int(np.searchsorted(ends, budget)) + 1, num_kept + 1)
    lengths = np.diff(ends[:num_spans], prepend=0)
    lengths[-1] += budget - lengths.sum()
    places = np.sort(rng.choice(num_kept + 1, size=num_spans, replace=False))
    masked, position = [], 0
    for gap, length in zip(np.diff(places, prepend=0).tolist(), lengths.tolist(), strict=True):
        masked += [*ids[position : position + gap], mask_id]
        position += gap + length
    return masked + ids[position:]


def shuffle_sentences(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer) -> list[int]:
    """Puts the sentences in random order."""
    sentences = tokenizer.split_sentence_ids(ids)
    return [token for index in rng.permutation(len(sentences)).tolist() for token in sentences[index]]


def hide(ids: list[int], rng: np.random.Generator, *, share: float, mask_id: int) -> list[int]:
    """Puts ``mask_id`` in the place of each id with the probability ``share``."""
    return np.where(rng.random(len(ids)) < share, mask_id, ids).tolist()
