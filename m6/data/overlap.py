"""Overlap of held-out splits with training rows: equal or similar images, equal texts, equal groups.

Resized, recompressed and converted images count as the same.
"""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

from m6.data.manifest import Manifest, SharedRows, Split
from m6.data.sources.text import text_key

# The search for near duplicates took 23 s for 50,000 random signatures on one core, 4.5 times as long as for 20,000.
# Above this number of images only equal images are found.
MAX_COMPARED = 200_000
_GRID = 16
_CELLS = _GRID * _GRID
# Levels of 255, measured on 48 parts of two photographs. After JPEG at quality 30, WebP at 60, or resizing by 0.5 or 2,
# cells differ by up to 5 and coarse colours by up to 7. The two most similar different parts, both sky, differ by 12
# and 13. Cropping by 2 of 160 pixels changes cells by 23 in the median: crops are not found.
_MAX_CELL_DIFFERENCE = 8
_COARSE = 4
_MAX_COARSE_DIFFERENCE = 8
_QUERIED = 32  # colours of a query: the neighbours of each may be all others, at 40 bytes


def signature(picture: bytes) -> NDArray[np.uint8]:
    """Returns the mean grey levels of an image in 16 x 16 cells, and its mean colours in 4 x 4 cells: uint8 [304]."""
    with Image.open(io.BytesIO(picture)) as image:
        colours = image.convert("RGB").resize((_GRID, _GRID), Image.Resampling.BOX)
    coarse = colours.resize((_COARSE, _COARSE), Image.Resampling.BOX)
    return np.concatenate([np.asarray(colours.convert("L")).ravel(), np.asarray(coarse).ravel()])


def has_near_duplicate(signatures: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Returns whether each image has a near duplicate among others.

    Near duplicates differ by at most 8 levels in each cell and each coarse colour.

    Args:
        signatures: [N, 304], of ``signature``, N > 0.
        others: [M, 304], M > 0.

    Returns:
        bool [N].
    """
    found = np.zeros(len(signatures), dtype=np.bool_)
    for row, candidates in _candidates(signatures, others):
        found[row] = _are_near(signatures[row], others[candidates]).any()
    return found


def join_near_duplicates(signatures: NDArray[np.uint8], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Joins the groups of near duplicates.

    Only images of different groups are compared, and pairs are joined into groups early. This avoids N^2 comparisons
    for N near duplicates, such as the frames of a fixed camera.

    Args:
        signatures: [N, 304], of ``signature``, N > 0.
        groups: [N], the least row of each row's group.

    Returns:
        The least row of each row's new group: [N].
    """
    pairs: list[tuple[int, int]] = []
    for row, candidates in _candidates(signatures, signatures):
        others = candidates[groups[candidates] != groups[row]]
        near = np.unique(groups[others[_are_near(signatures[row], signatures[others])]])
        pairs += [(int(groups[row]), group) for group in near.tolist()]
        if len(pairs) >= len(groups):
            groups, pairs = connected(pairs, len(groups))[groups], []
    return connected(pairs, len(groups))[groups]


def connected(pairs: Sequence[tuple[int, int]], rows: int) -> NDArray[np.int64]:
    """Joins pairs of rows into groups. Returns the least row of each row's group: int64 [rows]."""
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(ends), dtype=np.bool_), (ends[:, 0], ends[:, 1])), shape=(rows, rows))
    _, labels = connected_components(graph, directed=False)
    _, first, group = np.unique(labels, return_index=True, return_inverse=True)
    return first[group]


def _candidates(signatures: NDArray[np.uint8], others: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields each row with near coarse colours among others, and the rows of these others.

    Equal colours are looked up once: images of one scene often have equal colours.
    """
    own_colours, own_rows = _rows_of_colours(signatures)
    colours, rows = _rows_of_colours(others)
    tree = KDTree(colours)
    for begin in range(0, len(own_colours), _QUERIED):
        block = own_colours[begin : begin + _QUERIED]
        found = tree.query_ball_point(block, _MAX_COARSE_DIFFERENCE, p=np.inf)
        for number, near in enumerate(found, start=begin):
            if near:
                candidates = np.concatenate([rows[colour] for colour in near])
                yield from ((int(row), candidates) for row in own_rows[number])


def _rows_of_colours(signatures: NDArray[np.uint8]) -> tuple[NDArray[np.float32], list[NDArray[np.int64]]]:
    """Returns the unique coarse colours, and the rows of each."""
    colours, numbers, counts = np.unique(signatures[:, _CELLS:], axis=0, return_inverse=True, return_counts=True)
    rows = np.split(np.argsort(numbers.ravel(), kind="stable"), np.cumsum(counts)[:-1])
    return colours.astype(np.float32), rows


def _are_near(signature: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    cells = signature[:_CELLS].astype(np.int16)
    least = (cells - _MAX_CELL_DIFFERENCE).clip(min=0).astype(np.uint8)
    largest = (cells + _MAX_CELL_DIFFERENCE).clip(max=255).astype(np.uint8)
    compared = others[:, :_CELLS]
    within: NDArray[np.bool_] = (compared >= least) & (compared <= largest)
    return np.logical_and.reduce(within, axis=1)


_KINDS = ("picture", "text", "group")
_NONE = 0  # key of a missing value


class Contents:
    """Hashes of the rows of a split: 24 bytes for each row, and a signature of 304 bytes for each image.

    Signatures are kept for the first ``MAX_COMPARED`` images. With more images, only equal images are found.
    """

    def __init__(self) -> None:
        self._keys = {kind: array("Q") for kind in _KINDS}
        self._signatures: list[NDArray[np.uint8]] = []
        self._num_pictures = 0

    def add(self, group: str, text: str, image: bytes | None, answer: str | None) -> None:
        """Adds a row.

        The text of a row with an image and an answer is not compared: it is a label or belongs to a question.
        """
        self._keys["group"].append(_key(hashlib.sha256(group.encode()).digest()))
        self._keys["text"].append(_NONE if not text or (image and answer) else _key(text_key(text)))
        self._keys["picture"].append(_NONE if image is None else _key(hashlib.sha256(image).digest()))
        if image is not None:
            self._num_pictures += 1
            if self._num_pictures <= MAX_COMPARED:
                self._signatures.append(signature(image))

    def __len__(self) -> int:
        return len(self._keys["group"])

    def state(self) -> dict[str, NDArray[Any]]:
        """Returns arrays for ``add_state`` in another process."""
        keys = np.stack([self._of(kind) for kind in _KINDS])
        return {"keys": keys, "signatures": np.array(self._signatures, dtype=np.uint8)}

    def add_state(
        self, state: Mapping[str, NDArray[Any]], known: Mapping[str, NDArray[np.uint64]] | None = None
    ) -> None:
        """Adds the rows of another process.

        Args:
            state: from ``state``.
            known: result of ``known_keys`` of the held-out splits. Other keys are dropped, which saves memory for the
                training split in ``shared_with``.
        """
        for kind, values in zip(_KINDS, state["keys"], strict=True):
            added = values if known is None else values[_is_in(values, known[kind])]
            self._keys[kind].frombytes(added.tobytes())
        self._num_pictures += int((state["keys"][0] != _NONE).sum())
        if self._num_pictures <= MAX_COMPARED:
            self._signatures.extend(state["signatures"])

    @property
    def has_picture(self) -> NDArray[np.bool_]:
        """Whether each row has an image: bool [rows]."""
        return self._of("picture") != _NONE

    def shared_with(self, training: Contents) -> dict[str, NDArray[np.bool_]]:
        """Returns for "picture", "text" and "group" whether each row shares it with a training row: bool [rows].

        Resized or recompressed images count as shared, see ``has_near_duplicate``.
        """
        shared = {}
        for kind in self._keys:
            own = self._of(kind)
            shared[kind] = np.isin(own, training._of(kind)) & (own != _NONE)
        compared = max(self._num_pictures, training._num_pictures) <= MAX_COMPARED
        if self._signatures and training._signatures and compared:
            positions = np.flatnonzero(self.has_picture)
            near = has_near_duplicate(np.stack(self._signatures), np.stack(training._signatures))
            shared["picture"][positions[near]] = True
        return shared

    def count_shared(self, training: Contents) -> SharedRows:
        """Counts the rows with something in common with a training row."""
        shared = self.shared_with(training)
        some = np.logical_or.reduce(list(shared.values()))
        return SharedRows(rows=int(some.sum()), **{kind: int(rows.sum()) for kind, rows in shared.items()})

    def _of(self, kind: str) -> NDArray[np.uint64]:
        return np.array(self._keys[kind], dtype=np.uint64)


def known_keys(contents: Iterable[Contents]) -> dict[str, NDArray[np.uint64]]:
    """Returns the unique keys of "picture", "text" and "group", sorted."""
    splits = list(contents)
    different = {kind: np.unique(np.concatenate([each._of(kind) for each in splits])) for kind in _KINDS}
    return {kind: keys[keys != _NONE] for kind, keys in different.items()}


def count_groups(contents: Iterable[Contents]) -> int:
    """Counts the unique groups. Memory: 16 bytes for each, and one of the contents at a time."""
    groups = np.concatenate([np.unique(each._of("group")) for each in contents])
    groups.sort()
    return len(groups) and 1 + int(np.count_nonzero(groups[1:] != groups[:-1]))


def _is_in(keys: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Like ``np.isin``, for sorted ``known``: ``np.isin`` would sort it again in each call."""
    if not len(known):
        return np.zeros(len(keys), dtype=np.bool_)
    return known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") or 1


def describe_shared(manifest: Manifest, sources: Iterable[str], splits: Iterable[Split]) -> str:
    """Returns sentences on the overlap of held-out splits of some sources with their training rows."""
    held_out = [
        (f"{split} of {source}", manifest.split(source, split))
        for source in sources
        for split in splits
        if split != "train" and manifest.split(source, split).rows
    ]
    counted = [(name, entry.rows, entry.shared) for name, entry in held_out if entry.shared is not None]
    unknown = [name for name, entry in held_out if entry.shared is None]
    found = [f"{name} {shared.rows:,} of {rows:,} rows ({shared})" for name, rows, shared in counted if shared.rows]
    sentences = []
    if found:
        sentences.append(f"Also in the training rows of the same source: {'; '.join(found)}.")
    elif counted:
        sentences.append("No held-out row shares a picture, a text or a group with training rows of its source.")
    if unknown:
        sentences.append(f"What {', '.join(unknown)} share with training was not counted.")
    return " ".join(sentences)
