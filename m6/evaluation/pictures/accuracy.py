"""Accuracy of the judge on images: among all captions, among five captions, and by word."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from m6.evaluation.pictures.generated import CaptionedPictures
from m6.evaluation.pictures.judge import Judge

_CHOICES = 5
_JOINT = "的"  # between the words of a caption such as 红色的圆形


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the judge: the share of correctly classified images of a caption, averaged over the captions.

    Attributes:
        captions, pictures: numbers of judged captions and images.
        top_1, top_5: share of images with the correct caption as the judge's best guess, or among its best five.
        of_five: share of images with the correct caption ranked above four random other captions.
        words: for captions of two words such as 红色的圆形, the shares of images with a correct first and second word
            in the best guess; None if there are no such captions.
    """

    captions: int
    pictures: int
    top_1: float
    top_5: float
    of_five: float
    words: tuple[float, float] | None = None


def accuracy(judge: Judge, pictures: CaptionedPictures, scores: Tensor, captions: set[str]) -> Accuracy | None:
    """Returns the judge's accuracy on the images with one of ``captions``; None if there are none.

    Args:
        judge: the judge; its classes are the columns of ``scores``.
        pictures: n images.
        scores: [n, classes] logits.
        captions: captions of the images to count.
    """
    index = {caption: number for number, caption in enumerate(judge.captions)}
    composed = _composed(judge.captions)
    rng = np.random.default_rng(0)
    hits: dict[str, list[tuple[bool, ...]]] = collections.defaultdict(list)
    word_hits: dict[str, list[tuple[bool, bool]]] = collections.defaultdict(list)
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices.tolist()
    for caption, guesses, row in zip(pictures.captions, best, scores.numpy(), strict=True):
        if caption not in captions:
            continue
        right = index[caption]
        others = np.delete(np.arange(len(judge.captions)), right)
        others = rng.choice(others, size=min(_CHOICES - 1, len(others)), replace=False)
        hits[caption].append((guesses[0] == right, right in guesses, bool((row[others] < row[right]).all())))
        if caption in composed:
            first, second = composed[caption]
            guess_first, _, guess_second = judge.captions[guesses[0]].partition(_JOINT)
            word_hits[caption].append((guess_first == first, guess_second == second))
    if not hits:
        return None
    top_1, top_5, of_five = _mean(hits)
    words = None
    if word_hits:
        first_share, second_share = _mean(word_hits)
        words = (first_share, second_share)
    return Accuracy(len(hits), sum(map(len, hits.values())), top_1, top_5, of_five, words)


def _mean(hits: Mapping[str, Sequence[tuple[bool, ...]]]) -> list[float]:
    return np.array([np.mean(rows, axis=0) for rows in hits.values()]).mean(axis=0).tolist()


def _composed(captions: list[str]) -> dict[str, tuple[str, str]]:
    """The captions of two words, if both words also occur in other captions of two words."""
    parts = {caption: tuple(caption.split(_JOINT)) for caption in captions}
    pairs = {caption: (part[0], part[1]) for caption, part in parts.items() if len(part) == 2 and all(part)}
    firsts = collections.Counter(first for first, _ in pairs.values())
    seconds = collections.Counter(second for _, second in pairs.values())
    return {caption: pair for caption, pair in pairs.items() if firsts[pair[0]] > 1 and seconds[pair[1]] > 1}
