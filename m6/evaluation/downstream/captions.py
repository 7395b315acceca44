"""Image captioning: BLEU and chrF of the model's captions, and of captions found without a model."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CaptionScores:
    """chrF and BLEU-4 over characters, both of the corpus and from 0 to 100; the share that is equal to the letter."""

    chrf: float
    bleu: float
    exact: float


def score_captions(written: Sequence[str], references: Sequence[str]) -> CaptionScores:
    """Scores N captions against one reference each.

    chrF: Popovic, WMT 2015; BLEU: Papineni et al., ACL 2002; both as sacreBLEU computes them, which for Chinese
    takes every character as a word.
    """
    import sacrebleu

    exact = sum(a == b for a, b in zip(written, references, strict=True)) / len(references)
    chrf = sacrebleu.corpus_chrf(written, [references]).score
    bleu = sacrebleu.corpus_bleu(written, [references], tokenize="zh").score
    return CaptionScores(chrf, bleu, exact)


def most_frequent(texts: Sequence[str]) -> str:
    """The commonest caption or label, the first of equally common ones."""
    return collections.Counter(texts).most_common(1)[0][0]
