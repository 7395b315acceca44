"""Image-text retrieval: recall of a caption's pictures and of a picture's captions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m6.data.objectives import MATCH, NO_MATCH
from m6.generation.labelling import label_log_likelihoods
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.processor import M6Processor

RANKS = (1, 5, 10)


def found_at(scores: NDArray[np.float64], relevant: NDArray[np.bool_], k: int) -> NDArray[np.bool_]:
    """Returns which queries have a relevant candidate among the k highest scores, bool [Q]; recall@k is their share.

    Args:
        scores: [Q, C] for Q queries and C candidates. Ties are counted against the relevant candidates, so that
            constant scores find nothing.
        relevant: [Q, C], with at least one relevant candidate per row.
        k: at least 1.
    """
    # Only the best relevant candidate decides whether one is among the first k.
    best_relevant = np.where(relevant, scores, -np.inf).max(axis=1, keepdims=True)
    ahead = ((scores >= best_relevant) & ~relevant).sum(axis=1)
    return ahead < k


def chance(relevant: NDArray[np.bool_], k: int) -> float:
    """Returns the expected recall@k of a random order: the mean of 1 - C(n - r, k) / C(n, k) over the queries [Q, n],
    r of whose n candidates are relevant."""
    n = relevant.shape[1]
    k = min(k, n)
    return float(np.mean([1 - math.comb(n - int(r), k) / math.comb(n, k) for r in relevant.sum(axis=1)]))


def match_pairs(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    max_tokens: int,
) -> NDArray[np.float64]:
    """Returns log p(match) - log p(no match) of N pictures with their captions, [N].

    Args:
        model: fine-tuned on the objective image_text_matching, in evaluation mode.
        processor: processor of the model.
        pictures: N pictures, uint8 [image_size, image_size, 3].
        captions: N texts.
        max_tokens: length to which training cuts a text.
    """
    tokenizer = processor.tokenizer
    sources = [tokenizer.encode_ids(caption, max_tokens) for caption in captions]
    scores = label_log_likelihoods(model, processor, sources, (MATCH, NO_MATCH), pictures)
    # The difference of the two answers cancels how likely the model finds any answer for a pair.
    return (scores[:, 0] - scores[:, 1]).numpy()


def match_by_model(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    max_tokens: int,
) -> NDArray[np.float64]:
    """Returns what ``match_pairs`` says of every pair of N pictures and M captions, [N, M]."""
    # One picture at a time: the examples of all pairs would not fit into memory.
    return np.stack(
        [match_pairs(model, processor, [picture] * len(captions), captions, max_tokens) for picture in pictures]
    )


def match_by_neighbour(neighbour_captions: Sequence[str], captions: Sequence[str]) -> NDArray[np.float64]:
    """Returns the chrF similarity [N, M] of M captions to the captions of N pictures' nearest training pictures."""
    from sacrebleu.metrics import CHRF

    chrf = CHRF()
    return np.array([[chrf.sentence_score(c, [neighbour]).score for c in captions] for neighbour in neighbour_captions])
