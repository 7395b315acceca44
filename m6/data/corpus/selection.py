"""Which of several copies is kept. It depends on their contents alone, never on files, tasks or their order.

Of equal or similar documents that one is kept which its source put into the test split, else into the validation split;
else the longest; else the one with the least digest of text and id.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from m6.data.corpus.documents import Ranking, read_ranking
from m6.data.corpus.minhash import find_clusters
from m6.data.corpus.tally import Tally
from m6.data.corpus.work import Work
from m6.errors import UserError
from m6.files import atomic_path

KEPT, EXACT, NEAR = 0, 1, 2
REASONS = {EXACT: "exact duplicate", NEAR: "near duplicate"}
_NO_CLUSTER = -1


def choose(ranking: Ranking, clusters: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Chooses the kept document of each set of copies.

    Args:
        ranking: of N documents.
        clusters: cluster of each document, -1 for none; int64 [N].

    Returns:
        KEPT, EXACT or NEAR, uint8 [N]; and the document that is kept for each, int64 [N].
    """
    everyone = np.arange(len(clusters))
    original = _first_of(everyone, ranking.key, ranking, len(clusters))
    status = np.where(original == everyone, KEPT, EXACT).astype(np.uint8)
    # Equal texts are in one cluster, and those without a signature are in none.
    candidates = np.flatnonzero((status == KEPT) & (clusters != _NO_CLUSTER))
    kept = _first_of(candidates, clusters[candidates], ranking, len(clusters))
    status[(status == KEPT) & (kept != everyone)] = NEAR
    return status, kept[original]


def _first_of(documents: NDArray[np.int64], label: NDArray[Any], ranking: Ranking, count: int) -> NDArray[np.int64]:
    """Returns the best document among those of the same label, for each of ``count``; others are their own."""
    best = np.arange(count)
    if len(documents) == 0:
        return best
    longest_first = -ranking.chars[documents].astype(np.int64)
    # The last key counts most.
    order = np.lexsort((ranking.order[documents], longest_first, ranking.held_out[documents], label))
    labels = label[order]
    begins = np.flatnonzero(np.r_[True, labels[1:] != labels[:-1]])
    firsts = np.repeat(documents[order][begins], np.diff(np.r_[begins, len(labels)]))
    best[documents[order]] = firsts
    return best


def select(work: Work) -> Tally:
    """Joins the pairs of all buckets to clusters and writes, for each part, which documents are kept.

    One task does this, with about 100 bytes of memory for each document, and 150 more for each that has a copy.

    Raises:
        UserError: an input has no document left.
    """
    rankings = [read_ranking(work.documents(part)) for part in range(work.num_parts)]
    offsets = np.cumsum([0, *(len(ranking.key) for ranking in rankings)])
    _refuse_empty(work, np.diff(offsets))
    clusters = np.full(offsets[-1], _NO_CLUSTER, dtype=np.int64)
    for part, found in find_clusters(work.folder / "pairs", work.recipe.near_duplicates).items():
        clusters[offsets[part] + found[:, 0]] = found[:, 1]
    joined = Ranking(
        key=np.concatenate([each.key for each in rankings]),
        held_out=np.concatenate([each.held_out for each in rankings]),
        chars=np.concatenate([each.chars for each in rankings]),
        order=np.concatenate([each.order for each in rankings]),
    )
    status, kept = choose(joined, clusters)
    kept_part = np.searchsorted(offsets, kept, side="right") - 1
    for part in range(work.num_parts):
        rows = slice(offsets[part], offsets[part + 1])
        with atomic_path(work.decisions(part)) as temporary, temporary.open("wb") as file:
            row = kept[rows] - offsets[kept_part[rows]]
            np.savez(file, status=status[rows], kept_part=kept_part[rows], kept_row=row)
    return Tally()


def _refuse_empty(work: Work, documents: NDArray[np.int64]) -> None:
    left = dict.fromkeys(work.plan.inputs, 0)
    for part, count in zip(work.plan.parts, documents.tolist(), strict=True):
        left[part.input] += count
    for name, count in left.items():
        if not count:
            tally = Tally()
            for number, part in enumerate(work.plan.parts):
                if part.input == name:
                    tally.add(work.tally("clean", number))
            reasons = [f"{reason}: {n}" for found in tally.removed.values() for reason, n in found.most_common()]
            raise UserError(f'input "{name}" has no usable document ({"; ".join(reasons) or "it is empty"})')
