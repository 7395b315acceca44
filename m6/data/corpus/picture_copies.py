"""Near duplicates among the pictures of all parts, by files alone.

Each part writes thumbnails and sorted keys. A bucket is a range of keys: a task reads that range of all parts, joins
equal prefixes, and compares the thumbnails of the pairs.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from m6.data.corpus.picture_alignment import SIDE, has_few_colours, shows, thumbnail
from m6.data.corpus.picture_keys import CHECK_BITS, PREFIX_BITS, different_bits, keys_of, prefix, windows
from m6.files import atomic_path

# A key with its picture's number in the part, and the number of its window.
_KEY = np.dtype([("key", "<u8"), ("row", "<u4"), ("window", "u1")])
_PAIR = np.dtype([("copy", "<u4"), ("original", "<u4"), ("different", "u1"), ("window", "u1")])
_MAX_DIFFERENT = 8  # of 31 bits after the prefix: of pairs that share a prefix by chance 0.5 % pass
# Drawings share prefixes in masses. A picture is compared with the keys nearest in order, so the work is bounded.
_NEIGHBOURS = 64
_COMPARED = 512  # pairs at a time, about 100 MB
_JOINED = 1 << 16  # keys at a time, about 50 MB


class PictureWriter:
    """Writes keys and thumbnails of the pictures of a part, when the context ends without an exception.

    It keeps 5 kB for each picture until then, and 9 kB while it sorts.
    """

    def __init__(self, folder: Path, part: int) -> None:
        self._folder, self._part = folder, part
        self._thumbnails: list[NDArray[np.uint8]] = []
        self._keys: dict[str, list[NDArray[np.void]]] = {"windows": [], "wholes": []}

    def __enter__(self) -> PictureWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        shape = (len(self._thumbnails), SIDE, SIDE, 3)
        _save(_thumbnail_file(self._folder, self._part), np.array(self._thumbnails, dtype=np.uint8).reshape(shape))
        for role, keys in self._keys.items():
            joined = np.concatenate([np.empty(0, dtype=_KEY), *keys])
            _save(_key_file(self._folder, role, self._part), joined[np.argsort(joined["key"], kind="stable")])

    def write(self, picture: Image.Image) -> None:
        """Adds the next picture, RGB and without padding."""
        row = len(self._thumbnails)
        self._thumbnails.append(thumbnail(picture))
        windows_of, wholes = keys_of(picture)
        # A drawing of few colours is compared as a whole, so other windows of it need not be found.
        count = 1 if has_few_colours(self._thumbnails[-1][None])[0] else len(windows_of)
        for role, keys in (("windows", windows_of[:count]), ("wholes", wholes)):
            records = np.empty(len(keys), dtype=_KEY)
            records["key"], records["row"] = keys, row
            records["window"] = np.arange(len(keys)) if role == "windows" else 0
            self._keys[role].append(records)


def write_picture_pairs(folder: Path, num_parts: int, bucket: int, num_buckets: int) -> None:
    """Writes the pairs of near duplicates whose keys meet in a bucket: part and row of both, int64 [pairs, 4].

    Memory: for each picture of the corpus about 6 kB divided by the number of buckets.
    """
    pictures = _Pictures(folder, num_parts)
    window_keys = _read_keys(pictures, "windows", bucket, num_buckets)
    whole_keys = _read_keys(pictures, "wholes", bucket, num_buckets)
    found = [np.empty((0, 2), dtype=np.int64)]
    met = _best(list(_meetings(whole_keys, window_keys)))
    for start in range(0, len(met), _COMPARED):
        some = met[start : start + _COMPARED]
        copies, originals = pictures.thumbnails(some["copy"]), pictures.thumbnails(some["original"])
        is_copy = shows(copies, originals, windows()[some["window"]])
        found.append(np.stack([some["copy"], some["original"]], axis=1)[is_copy].astype(np.int64))
    pairs = np.unique(np.sort(np.concatenate(found), axis=1), axis=0)
    places = np.concatenate([np.stack(pictures.places(side), axis=1) for side in pairs.T], axis=1)
    _save(_pair_file(folder, bucket), places)


def picture_pairs(folder: Path, num_buckets: int) -> NDArray[np.int64]:
    """Returns the pairs of all buckets: part and row of both, [pairs, 4]."""
    found = [np.load(_pair_file(folder, bucket)) for bucket in range(num_buckets)]
    pairs: NDArray[np.int64] = np.unique(np.concatenate(found), axis=0)
    return pairs


class _Pictures:
    """The pictures of all parts, numbered in order."""

    def __init__(self, folder: Path, num_parts: int) -> None:
        self.folder = folder
        # Parts of texts have no file.
        self.parts = [part for part in range(num_parts) if _thumbnail_file(folder, part).exists()]
        counts = [len(_load(_thumbnail_file(folder, part))) for part in self.parts]
        self._offsets = np.cumsum([0, *counts])

    def numbers(self, index: int, rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Returns the numbers of rows of ``parts[index]``."""
        return (rows + self._offsets[index]).astype(np.uint32)

    def places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the parts and rows of pictures."""
        index = np.searchsorted(self._offsets, numbers, side="right") - 1
        return np.array(self.parts, dtype=np.int64)[index], numbers - self._offsets[index]

    def thumbnails(self, numbers: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Reads thumbnails: uint8 [N, 32, 32, 3]."""
        found = np.empty((len(numbers), SIDE, SIDE, 3), dtype=np.uint8)
        parts, rows = self.places(numbers.astype(np.int64))
        for part in np.unique(parts):
            chosen = parts == part
            found[chosen] = _load(_thumbnail_file(self.folder, part))[rows[chosen]]
        return found


class _Keys(NamedTuple):
    """Keys in order, of N windows or wholes: uint64 [N], the numbers of their pictures and windows."""

    key: NDArray[np.uint64]
    picture: NDArray[np.uint32]
    window: NDArray[np.uint8]


def _read_keys(pictures: _Pictures, role: str, bucket: int, num_buckets: int) -> _Keys:
    """The keys of a bucket, from bucket / num_buckets of their range on."""
    first, last = ((number << (PREFIX_BITS + CHECK_BITS)) // num_buckets for number in (bucket, bucket + 1))
    found = [np.empty(0, dtype=_KEY)]
    for index, part in enumerate(pictures.parts):
        keys = _load(_key_file(pictures.folder, role, part))
        # Of the mapped file only what is needed is read.
        begin, end = bisect.bisect_left(keys["key"], first), bisect.bisect_left(keys["key"], last)
        found.append(np.array(keys[begin:end]))
        found[-1]["row"] = pictures.numbers(index, found[-1]["row"])
    keys = np.concatenate(found)
    keys = keys[np.argsort(keys["key"], kind="stable")]
    return _Keys(*(np.ascontiguousarray(keys[name]) for name in ("key", "row", "window")))


def _meetings(wholes: _Keys, window_keys: _Keys) -> Iterator[NDArray[np.void]]:
    """Yields pairs of different pictures of which a whole and a window have the same prefix."""
    prefixes = prefix(window_keys.key)
    for start in range(0, len(wholes.key), _JOINED):
        keys = wholes.key[start : start + _JOINED]
        low = np.searchsorted(prefixes, prefix(keys), side="left")
        high = np.searchsorted(prefixes, prefix(keys), side="right")
        nearest = np.searchsorted(window_keys.key, keys) - _NEIGHBOURS // 2
        begin = np.clip(nearest, low, np.maximum(high - _NEIGHBOURS, low))
        end = np.minimum(high, begin + _NEIGHBOURS)
        found = []
        for offset in range(int((end - begin).max(initial=0))):
            whole = np.flatnonzero(begin + offset < end)
            window = begin[whole] + offset
            copies, originals = wholes.picture[start + whole], window_keys.picture[window]
            differences = different_bits(keys[whole], window_keys.key[window])
            chosen = (differences <= _MAX_DIFFERENT) & (copies != originals)
            pairs = np.empty(int(chosen.sum()), dtype=_PAIR)
            pairs["copy"], pairs["original"] = copies[chosen], originals[chosen]
            pairs["different"], pairs["window"] = differences[chosen], window_keys.window[window[chosen]]
            found.append(pairs)
        if found:
            yield _best(found)


def _best(found: list[NDArray[np.void]]) -> NDArray[np.void]:
    """Of each pair the window with the fewest different bits."""
    pairs = np.concatenate([np.empty(0, dtype=_PAIR), *found])
    pairs = np.sort(pairs, order=_PAIR.names)
    is_first = np.ones(len(pairs), dtype=bool)
    is_first[1:] = (pairs["copy"][1:] != pairs["copy"][:-1]) | (pairs["original"][1:] != pairs["original"][:-1])
    return pairs[is_first]


def _load(file: Path) -> NDArray[Any]:
    loaded: NDArray[Any] = np.load(file, mmap_mode="r")
    return loaded


def _save(file: Path, array: NDArray[np.generic]) -> None:
    with atomic_path(file) as temporary, temporary.open("wb") as opened:
        np.save(opened, array)


def _thumbnail_file(folder: Path, part: int) -> Path:
    return folder / "thumbnails" / f"{part:05d}.npy"


def _key_file(folder: Path, role: str, part: int) -> Path:
    return folder / role / f"{part:05d}.npy"


def _pair_file(folder: Path, bucket: int) -> Path:
    return folder / "pairs" / f"{bucket:05d}.npy"
