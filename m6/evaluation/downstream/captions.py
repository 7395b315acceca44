"""Scores of image captions: BLEU and chrF."""

from __future__ import annotations

import collections
from collections.abc import Sequence


def chrf(written: Sequence[str], references: Sequence[str]) -> float:
    """Returns chrF (Popovic, WMT 2015) of N captions against one reference each, from 0 to 100."""
    import sacrebleu

    return sacrebleu.corpus_chrf(written, [references]).score


def bleu(written: Sequence[str], references: Sequence[str]) -> float:
    """Returns BLEU-4 (Papineni et al., ACL 2002) over characters of N captions against one reference each, to 100."""
    import sacrebleu

    return sacrebleu.corpus_bleu(written, [references], tokenize="zh").score


def most_frequent(texts: Sequence[str]) -> str:
    """Returns the most frequent caption or label; the first one if several are equally frequent."""
    return collections.Counter(texts).most_common(1)[0][0]
