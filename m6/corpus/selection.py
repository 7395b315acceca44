"""Chooses one document of each set of copies, by contents only: independent of files, tasks and order.

Copies are ranked in this order: documents of their source's test split, then of its validation split; longer texts, or
images with more pixels; the smaller digest of contents and id. The first is kept. No copy of an image of a named set is
kept. The recipe limits the number of images with the same caption; the same ranking decides. An image with a mismatched
caption ranks last: it is removed itself, and no copy is removed in its favour.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from m6.corpus.counters import Counters
from m6.corpus.picture_copies import picture_pairs
from m6.corpus.plan import Part
from m6.corpus.text_copies import find_clusters
from m6.corpus.work import Ranking, Work, mismatched, read_ranking
from m6.errors import UserError
from m6.files import atomic_path

KEPT, EXACT, NEAR, NAMED, REPEATED, MISMATCHED = range(6)
REASONS = {
    EXACT: ("duplicates", "exact duplicate"),
    NEAR: ("duplicates", "near duplicate"),
    NAMED: ("decontamination", "shows a picture of a named set"),
    REPEATED: ("captions", "caption repeats too often"),
    MISMATCHED: ("matching", "caption does not describe the picture"),
}
"""Stage and reason of a removal, by status."""
_NO_LIMIT = np.iinfo(np.int64).max
_NO_CLUSTER = -1
_LAST = 4  # ranks after all values of ``Ranking.held_out``


def choose(ranking: Ranking, clusters: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Chooses the kept document of each set of copies.

    Args:
        ranking: of N documents.
        clusters: cluster of each document, -1 for none; int64 [N].

    Returns:
        The status KEPT, EXACT or NEAR, uint8 [N]; and for each document the kept one of its copies, int64 [N].
    """
    everyone = np.arange(len(clusters))
    original = _first_of(everyone, ranking.key, ranking, len(clusters))
    status = np.where(original == everyone, KEPT, EXACT).astype(np.uint8)
    # Equal texts are in one cluster. Texts without a signature are in no cluster.
    candidates = np.flatnonzero((status == KEPT) & (clusters != _NO_CLUSTER))
    kept = _first_of(candidates, clusters[candidates], ranking, len(clusters))
    status[(status == KEPT) & (kept != everyone)] = NEAR
    return status, kept[original]


def _first_of(documents: NDArray[np.int64], label: NDArray[Any], ranking: Ranking, count: int) -> NDArray[np.int64]:
    """Returns the best document with the same label for each of ``count`` documents; for an unlabelled one, itself."""
    best = np.arange(count)
    if len(documents) == 0:
        return best
    order = _order(documents, label, ranking)
    labels = label[order]
    begins = np.flatnonzero(np.r_[True, labels[1:] != labels[:-1]])
    firsts = np.repeat(documents[order][begins], np.diff(np.r_[begins, len(labels)]))
    best[documents[order]] = firsts
    return best


def _order(documents: NDArray[np.int64], label: NDArray[Any], ranking: Ranking) -> NDArray[np.int64]:
    """Sorts documents by label, the best of each label first."""
    largest_first = -ranking.size[documents].astype(np.int64)
    # lexsort sorts by the last key first.
    return np.lexsort((ranking.order[documents], largest_first, ranking.held_out[documents], label))


def repeated_captions(
    kept: NDArray[np.int64], ranking: Ranking, limits: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Finds images above the limit of their caption.

    Args:
        kept: documents left after deduplication, int64 [K] of N.
        ranking: of N documents; texts have no caption.
        limits: most images with the caption of each document, int64 [N]. Images without a limit are not counted.

    Returns:
        The documents to remove, and for each the best document with its caption.
    """
    counted = kept[(ranking.caption[kept] != 0) & (limits[kept] < _NO_LIMIT)]
    if len(counted) == 0:
        return counted, counted
    order = counted[_order(counted, ranking.caption[counted], ranking)]
    captions = ranking.caption[order]
    begins = np.flatnonzero(np.r_[True, captions[1:] != captions[:-1]])
    first = np.repeat(begins, np.diff(np.r_[begins, len(order)]))
    too_many = np.arange(len(order)) - first >= limits[order]
    return order[too_many], order[first[too_many]]


def select(work: Work) -> Counters:
    """Joins the pairs of all buckets into clusters, chooses the kept documents, and writes the choice of each part.

    One task does this. Memory: about 100 bytes for each document, and 150 more for each document with a copy.

    Raises:
        UserError: an input has no usable document.
    """
    rankings = [read_ranking(work.documents(part)) for part in range(work.num_parts)]
    offsets = np.cumsum([0, *(len(ranking.key) for ranking in rankings)])
    _refuse_empty(work, np.diff(offsets))
    joined = Ranking(
        **{field.name: np.concatenate([getattr(each, field.name) for each in rankings]) for field in fields(Ranking)}
    )
    fits_not = np.concatenate([mismatched(work, part, len(each.key)) for part, each in enumerate(rankings)])
    joined.held_out[fits_not] = _LAST
    status, kept = choose(joined, _clusters(work, offsets, joined.key))
    is_named = np.repeat([part.input in work.plan.sets for part in work.plan.parts], np.diff(offsets))
    status[is_named[kept] & ~is_named] = NAMED
    status[(status == KEPT) & fits_not] = MISMATCHED
    limits = np.repeat([_caption_limit(work, part) for part in work.plan.parts], np.diff(offsets))
    repeated, instead = repeated_captions(np.flatnonzero((status == KEPT) & ~is_named), joined, limits)
    status[repeated], kept[repeated] = REPEATED, instead
    kept_part = np.searchsorted(offsets, kept, side="right") - 1
    for part in range(work.num_parts):
        rows = slice(offsets[part], offsets[part + 1])
        with atomic_path(work.decisions(part)) as temporary, temporary.open("wb") as file:
            row = kept[rows] - offsets[kept_part[rows]]
            np.savez(file, status=status[rows], kept_part=kept_part[rows], kept_row=row)
    return Counters()


def _clusters(work: Work, offsets: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The cluster of each document, -1 for none. Clusters of texts have even numbers, clusters of images odd ones."""
    clusters = np.full(offsets[-1], _NO_CLUSTER, dtype=np.int64)
    kinds = work.plan.kinds()
    if "text" in kinds:
        pairs_of_texts = work.folder / "pairs"
        for part, found in find_clusters(pairs_of_texts, work.num_text_parts, work.recipe.near_duplicates).items():
            clusters[offsets[part] + found[:, 0]] = 2 * found[:, 1].astype(np.int64)
    if "image_text" in kinds:
        pairs = picture_pairs(work.pictures, work.recipe.picture_buckets)
        pictures, labels = joined_pairs(offsets[pairs[:, 0::2]] + pairs[:, 1::2], keys)
        clusters[pictures] = 2 * labels + 1
    return clusters


def joined_pairs(pairs: NDArray[np.int64], keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Joins pairs of documents into clusters.

    Args:
        pairs: documents, int64 [P, 2].
        keys: keys of N documents, uint64 [N]. Documents with equal keys are in one cluster.

    Returns:
        The documents connected to a pair, and the cluster of each. Connected components are needed because an image
        with many copies may be paired with only some of them.
    """
    order = np.argsort(keys, kind="stable")
    equal = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    edges = np.concatenate([pairs, np.stack([order[equal], order[equal + 1]], axis=1)])
    graph = coo_array((np.ones(len(edges), dtype=np.int8), (edges[:, 0], edges[:, 1])), shape=(len(keys), len(keys)))
    _, labels = connected_components(graph, directed=False)
    documents = np.flatnonzero(np.isin(labels, labels[pairs]))
    return documents, labels[documents].astype(np.int64)


def _caption_limit(work: Work, part: Part) -> int:
    if part.input in work.plan.sets or work.plan.kind(part) == "text":
        return _NO_LIMIT
    return work.recipe.picture_filters_of(part.input).max_caption_repeats or _NO_LIMIT


def _refuse_empty(work: Work, documents: NDArray[np.int64]) -> None:
    left = dict.fromkeys((*work.plan.inputs, *work.plan.sets), 0)
    for part, count in zip(work.plan.parts, documents.tolist(), strict=True):
        left[part.input] += count
    for name, count in left.items():
        if not count:
            counters = Counters()
            for number, part in enumerate(work.plan.parts):
                if part.input == name:
                    counters.add(work.counters("clean", number))
            reasons = [f"{reason}: {n}" for found in counters.removed.values() for reason, n in found.most_common()]
            raise UserError(f'input "{name}" has no usable document ({"; ".join(reasons) or "it is empty"})')
