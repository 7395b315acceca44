"""How well captions describe their pictures, by a trained model.

Models lie above the data in the order of imports: who makes a corpus passes the function that opens one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from m6.data.corpus.documents import read_documents
from m6.data.corpus.tally import Tally
from m6.files import atomic_path

if TYPE_CHECKING:
    from m6.data.corpus.work import Work

_SCORED = 512  # pictures at a time: always the same ones together, whatever the number of tasks


class PictureScorer(Protocol):
    """A model that compares pictures with captions.

    Attributes:
        identity: checksum of what determines the scores.
    """

    identity: str

    def __call__(self, pictures: Sequence[bytes], captions: Sequence[str]) -> NDArray[np.float64]:
        """Returns the probability that each caption describes its picture file, float64 [N]."""
        ...


OpenScorer = Callable[[Path], PictureScorer]
"""Opens the model of a folder. Other processes get it pickled, so it is a function or a class of a module."""


def score_part(work: Work, part: int) -> Tally:
    """Writes the scores of the pictures of a part whose input has a threshold: float64 [documents]."""
    if work.min_match(part) > 0:
        scores = [np.empty(0, dtype=np.float64)]
        documents = read_documents(work.documents(part))
        while rows := list(islice(documents, _SCORED)):
            pictures = [row.image for row in rows if row.image is not None]
            scores.append(work.scorer(pictures, [row.text for row in rows]))
        with atomic_path(work.scores(part)) as temporary, temporary.open("wb") as file:
            np.save(file, np.concatenate(scores))
    return Tally()


def mismatched(work: Work, part: int, documents: int) -> NDArray[np.bool_]:
    """Returns which documents of a part have a caption that does not describe the picture, bool [documents]."""
    threshold = work.min_match(part)
    if threshold == 0:
        return np.zeros(documents, dtype=bool)
    return np.load(work.scores(part)) < threshold
