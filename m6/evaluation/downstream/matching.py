"""Image-text matching: does a caption find its picture among all, and a picture its caption?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m6.data.objectives import MATCH, NO_MATCH, Example
from m6.generation.likelihood import target_log_likelihoods
from m6.model.modeling import M6ForConditionalGeneration
from m6.tokenizers.processor import M6Processor

RANKS = (1, 5, 10)


@dataclass(frozen=True)
class Recalls:
    """recall@k for each k of RANKS, by the captions' pictures and by the pictures' captions."""

    text_to_picture: tuple[float, ...]
    picture_to_text: tuple[float, ...]


def recall_at(scores: NDArray[np.float64], relevant: NDArray[np.bool_], k: int) -> float:
    """Share of queries with something relevant among the k candidates of the highest score.

    Args:
        scores: [Q, C]. Of equal scores the irrelevant candidates come first, so that constant scores find nothing.
        relevant: [Q, C], at least one in each row.
        k: at least 1.
    """
    best_relevant = np.where(relevant, scores, -np.inf).max(axis=1, keepdims=True)
    ahead = ((scores >= best_relevant) & ~relevant).sum(axis=1)
    return float((ahead < k).mean())


def score_matches(scores: NDArray[np.float64], relevant: NDArray[np.bool_]) -> Recalls:
    """Recalls of the scores [pictures, captions]."""
    return Recalls(
        tuple(recall_at(scores.T, relevant.T, k) for k in RANKS), tuple(recall_at(scores, relevant, k) for k in RANKS)
    )


def chance(relevant: NDArray[np.bool_]) -> Recalls:
    """Expected recalls of a random order: 1 - C(n - r, k) / C(n, k) with r of n candidates relevant."""

    def expected(rows: NDArray[np.bool_], k: int) -> float:
        n = rows.shape[1]
        k = min(k, n)
        return float(np.mean([1 - math.comb(n - int(r), k) / math.comb(n, k) for r in rows.sum(axis=1)]))

    return Recalls(tuple(expected(relevant.T, k) for k in RANKS), tuple(expected(relevant, k) for k in RANKS))


def match_by_model(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    pictures: Sequence[np.ndarray],
    captions: Sequence[str],
    max_tokens: int,
) -> NDArray[np.float64]:
    """log p(match) - log p(no match) of every pair.

    Args:
        model: fine-tuned on the objective image_text_matching, in evaluation mode.
        processor: of the model.
        pictures: N, uint8 [image_size, image_size, 3].
        captions: M texts.
        max_tokens: where training cuts a text.

    Returns:
        [N, M].
    """
    tokenizer = processor.tokenizer
    sources = [tokenizer.encode_ids(caption, max_tokens) for caption in captions]
    answers = [tokenizer.encode_ids(answer) for answer in (MATCH, NO_MATCH)]
    examples = [
        Example(source_ids=source, target_ids=answer) for _ in pictures for source in sources for answer in answers
    ]
    shown = [picture for picture in pictures for _ in range(len(sources) * len(answers))]
    scores = target_log_likelihoods(model, processor, examples, shown).view(len(pictures), len(captions), 2)
    return (scores[:, :, 0] - scores[:, :, 1]).numpy()


def match_by_neighbour(neighbour_captions: Sequence[str], captions: Sequence[str]) -> NDArray[np.float64]:
    """How similar (chrF) each caption [M] is to that of a picture's nearest training picture [N]: [N, M]."""
    from sacrebleu.metrics import CHRF

    chrf = CHRF()
    return np.array([[chrf.sentence_score(c, [known]).score for c in captions] for known in neighbour_captions])
