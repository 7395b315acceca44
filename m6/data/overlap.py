"""Which rows of a held-out split share a picture, a text or a group with training rows."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m6.data.duplicates import MAX_COMPARED, has_near_duplicate, signature
from m6.data.manifest import Manifest, SharedRows, Split
from m6.data.sources.text import text_key

_KINDS = ("picture", "text", "group")
_NONE = 0  # the key of what a row does not have


class Contents:
    """What the rows of a split hold: 24 bytes of each row, and 304 of the signature of each picture.

    Of more than ``MAX_COMPARED`` pictures no signatures are kept: only equal pictures are then found.
    """

    def __init__(self) -> None:
        self._keys = {kind: array("Q") for kind in _KINDS}
        self._signatures: list[NDArray[np.uint8]] = []
        self._num_pictures = 0

    def add(self, group: str, text: str, image: bytes | None, answer: str | None) -> None:
        """Adds a row. A text beside a picture and an answer is a label or belongs to a question: it is not compared."""
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
        """Returns arrays that ``add_state`` takes, in another process."""
        keys = np.stack([self._of(kind) for kind in _KINDS])
        return {"keys": keys, "signatures": np.array(self._signatures, dtype=np.uint8)}

    def add_state(
        self, state: Mapping[str, NDArray[Any]], known: Mapping[str, NDArray[np.uint64]] | None = None
    ) -> None:
        """Adds the rows of another process.

        Args:
            state: from ``state``.
            known: of ``known_keys``, for the ``training`` of ``shared_with``: other keys are left out.
        """
        for kind, values in zip(_KINDS, state["keys"], strict=True):
            added = values if known is None else values[_is_in(values, known[kind])]
            self._keys[kind].frombytes(added.tobytes())
        self._num_pictures += int((state["keys"][0] != _NONE).sum())
        if self._num_pictures <= MAX_COMPARED:
            self._signatures.extend(state["signatures"])

    @property
    def has_picture(self) -> NDArray[np.bool_]:
        """Of each row: whether it has a picture."""
        return self._of("picture") != _NONE

    def shared_with(self, training: Contents) -> dict[str, NDArray[np.bool_]]:
        """Returns for "picture", "text" and "group" which rows share it with a training row: bool [rows] each.

        Pictures are compared by ``m6.data.duplicates``: a resized or recompressed one is found.
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
        """Counts the rows that share something with a training row."""
        shared = self.shared_with(training)
        some = np.logical_or.reduce(list(shared.values()))
        return SharedRows(rows=int(some.sum()), **{kind: int(rows.sum()) for kind, rows in shared.items()})

    def _of(self, kind: str) -> NDArray[np.uint64]:
        return np.array(self._keys[kind], dtype=np.uint64)


def known_keys(contents: Iterable[Contents]) -> dict[str, NDArray[np.uint64]]:
    """Returns the different keys of "picture", "text" and "group" in order."""
    splits = list(contents)
    different = {kind: np.unique(np.concatenate([each._of(kind) for each in splits])) for kind in _KINDS}
    return {kind: keys[keys != _NONE] for kind, keys in different.items()}


def count_groups(contents: Iterable[Contents]) -> int:
    """Counts the different groups. Memory: 16 bytes for each, beside the contents, which need not exist at one time."""
    groups = np.concatenate([np.unique(each._of("group")) for each in contents])
    groups.sort()
    return len(groups) and 1 + int(np.count_nonzero(groups[1:] != groups[:-1]))


def _is_in(keys: NDArray[np.uint64], known: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """As ``np.isin``, which would sort all that is known, here in order already, for each part of the keys."""
    if not len(known):
        return np.zeros(len(keys), dtype=np.bool_)
    return known[np.minimum(np.searchsorted(known, keys), len(known) - 1)] == keys


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") or 1


def describe_shared(manifest: Manifest, sources: Iterable[str], splits: Iterable[Split]) -> str:
    """Returns sentences about what held-out splits of some sources share with the training rows of their source."""
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
