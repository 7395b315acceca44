"""Scores of image captions: BLEU, chrF and exact match."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CaptionScores:
    """Scores of a corpus of captions.

    Attributes:
        chrf: from 0 to 100.
        bleu: BLEU-4 over characters, from 0 to 100.
        exact: share of captions that are equal to their reference.
    """

    chrf: float
    bleu: float
    exact: float


def score_captions(written: Sequence[str], references: Sequence[str]) -> CaptionScores:
    """Scores N captions against one reference each.

    chrF: Popovic, WMT 2015. BLEU: Papineni et al., ACL 2002. Both are computed by sacreBLEU, whose Chinese tokenizer
    treats every character as a word.
    """
    import sacrebleu

    exact = sum(a == b for a, b in zip(written, references, strict=True)) / len(references)
    chrf = sacrebleu.corpus_chrf(written, [references]).score
    bleu = sacrebleu.corpus_bleu(written, [references], tokenize="zh").score
    return CaptionScores(chrf, bleu, exact)


def most_frequent(texts: Sequence[str]) -> str:
    """Returns the most frequent caption or label; the first one if several are equally frequent."""
    return collections.Counter(texts).most_common(1)[0][0]
