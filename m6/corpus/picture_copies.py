"""Near duplicates among the images of all parts. Tasks exchange only files.

Each part writes thumbnails and sorted keys. A bucket is a range of keys. A task reads this range of all parts, joins
equal prefixes, and compares the thumbnails of the resulting pairs.

A copy may be resized, compressed again, or cropped by up to a tenth of each side. A key holds the signs of 63 low
frequencies (DCT) of the grey image, as in perceptual hashes. A crop changes most signs. So an image gets 100 window
keys, one for each of 100 crops. It also gets 56 whole keys, used when it is itself the copy: the key of the whole image
with its uncertain signs in both states. One whole key of a copy and one window key of the original agree in the first
32 signs and in most others. All sums are sums of whole numbers, so keys are equal on every processor.

The comparison lays a photograph over the window of the matching key, moves it to the best fit (Lucas and Kanade 1981),
and compares up to brightness and contrast. A drawing of few colours would fit too many others this way: a circle fits
any circle. Drawings are compared without alignment, and with their brightness.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from m6.files import atomic_path

SIDE = 32  # of a thumbnail
_STEPS = 4
_MAX_STEP = 0.03  # of the side
_BEYOND = 0.01  # a window may end this far outside the image, for rounding
_FEW_COLOURS = 72  # of 32,768; 2,500 icons, shapes and easy-VQA drawings have up to 69, 95 % of 349 photographs more
# Measured on 349 photographs, each cropped by a tenth, halved and stored at quality 30: the residual is up to 0.17 of
# the contrast, and up to 0.10 in 95 %. Photographs of different things have at least 0.21.
_MAX_REST = 0.15
_MAX_DIFFERENCE = 40  # levels of 255 at one pixel: up to 37 in 98 % of these copies; a face with another mouth has more
_GAINS = (0.5, 2.0)
_MAX_DRAWING_DIFFERENCE = 12  # levels; up to 10 in 95 % of re-encoded photographs on white


def thumbnail(picture: Image.Image) -> NDArray[np.uint8]:
    """Resizes an RGB image, given without padding, to 32 x 32 pixels; proportions are not kept: uint8 [32, 32, 3]."""
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def shows(wholes: NDArray[np.uint8], pictures: NDArray[np.uint8], windows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Decides for each of N pairs whether the first image is a copy of a window of the second.

    Args:
        wholes: thumbnails of the possible copies, uint8 [N, 32, 32, 3].
        pictures: thumbnails of the possible originals, uint8 [N, 32, 32, 3].
        windows: left, right, top and bottom of the windows as shares of the sides, accurate to 0.03, [N, 4].

    Returns:
        bool [N].
    """
    is_drawing = has_few_colours(wholes) | has_few_colours(pictures)
    found = np.empty(len(wholes), dtype=np.bool_)
    for test, chosen in ((_is_same_drawing, is_drawing), (_is_same_photograph, ~is_drawing)):
        some = np.flatnonzero(chosen)
        found[some] = test(wholes[some].astype(np.float64), pictures[some].astype(np.float64), windows[some])
    return found


def _is_same_drawing(
    copies: NDArray[np.float64], originals: NDArray[np.float64], windows: NDArray[np.float64]
) -> NDArray[np.bool_]:
    del windows
    return np.abs(_smooth(copies - originals)).max(axis=(1, 2, 3), initial=0) <= _MAX_DRAWING_DIFFERENCE


def _is_same_photograph(
    copies: NDArray[np.float64], originals: NDArray[np.float64], windows: NDArray[np.float64]
) -> NDArray[np.bool_]:
    edges = _aligned(originals.mean(axis=-1), copies.mean(axis=-1), windows)
    gain, rest = _rest(_resampled(originals, edges), copies)
    rest = _smooth(rest)
    fits: NDArray[np.bool_] = np.sqrt((rest**2).mean(axis=(1, 2, 3))) <= _MAX_REST * copies.std(axis=(1, 2, 3))
    fits &= np.abs(rest).max(axis=(1, 2, 3), initial=0) <= _MAX_DIFFERENCE
    return fits & (gain >= _GAINS[0]) & (gain <= _GAINS[1])


def _aligned(
    originals: NDArray[np.float64], copies: NDArray[np.float64], windows: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Moves the edges of the windows [N, 4] to the best fit of originals to copies (grey, [N, 32, 32] each)."""
    share = (np.arange(SIDE) + 0.5) / SIDE
    edges = windows.copy()
    for _ in range(_STEPS):
        shown = _resampled(originals[..., None], edges)[..., 0]
        gain, rest = _rest(shown[..., None], copies[..., None])
        down, across = np.gradient(shown, axis=(1, 2))
        across *= (gain * SIDE / (edges[:, 1] - edges[:, 0]))[:, None, None]
        down *= (gain * SIDE / (edges[:, 3] - edges[:, 2]))[:, None, None]
        # Derivatives of each pixel's brightness with respect to the four edges, the contrast and the mean brightness.
        moves = (across * (1 - share), across * share, down * (1 - share)[:, None], down * share[:, None])
        effects = np.stack([*moves, shown, np.ones_like(shown)], axis=-1).reshape(-1, SIDE * SIDE, 6)
        transposed = effects.transpose(0, 2, 1)
        normal = transposed @ effects
        # Keeps the solution finite where an image does not determine an edge.
        slight = 1e-3 * (1 + np.trace(normal[:, :4, :4], axis1=1, axis2=2) / 4)
        normal += slight[:, None, None] * np.diag([1, 1, 1, 1, 0, 0]) + 1e-3 * np.eye(6)
        step = np.linalg.solve(normal, transposed @ rest.reshape(-1, SIDE * SIDE, 1))[:, :4, 0]
        edges = np.clip(edges + np.clip(step, -_MAX_STEP, _MAX_STEP), -_BEYOND, 1 + _BEYOND)
    return edges


def _resampled(pictures: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Crops windows [N, 4] out of images [N, 32, 32, C], interpolated linearly to 32 x 32 pixels."""
    across, down = _weights(edges[:, 0], edges[:, 1]), _weights(edges[:, 2], edges[:, 3])
    channels = pictures.transpose(3, 0, 1, 2)
    shown: NDArray[np.float64] = (down @ channels @ across.transpose(0, 2, 1)).transpose(1, 2, 3, 0)
    return shown


def _weights(begin: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of linear interpolation along one axis, from pixels to 32 points between two edges: [N, 32, 32]."""
    places = begin[:, None] + (end - begin)[:, None] * (np.arange(SIDE) + 0.5) / SIDE
    places = np.clip(places * SIDE - 0.5, 0, SIDE - 1)
    return np.maximum(0, 1 - np.abs(places[:, :, None] - np.arange(SIDE)))


def _rest(shown: NDArray[np.float64], copies: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fits contrast and brightness of all channels together: the gain [N], and the residual [N, 32, 32, C]."""
    places = (1, 2, 3)
    centred = shown - shown.mean(axis=places, keepdims=True)
    wanted = copies - copies.mean(axis=places, keepdims=True)
    gain = (centred * wanted).sum(axis=places) / np.maximum((centred**2).sum(axis=places), 1e-6)
    return gain, wanted - gain[:, None, None, None] * centred


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Blurs [N, 32, 32, C] with weights 1, 2, 1 on both axes, because resizing makes edges differ."""
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (0, 0)), "edge")
    padded = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    smooth: NDArray[np.float64] = (padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]) / 4
    return smooth


def has_few_colours(thumbnails: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether thumbnails [N, 32, 32, 3] have few colours, at 32 levels per channel, as drawings do: [N]."""
    codes = (thumbnails // 8).astype(np.int32).reshape(-1, SIDE * SIDE, 3) @ np.array([1024, 32, 1], np.int32)
    codes.sort(axis=1)
    few: NDArray[np.bool_] = (np.diff(codes, axis=1) != 0).sum(axis=1) + 1 < _FEW_COLOURS
    return few


PREFIX_BITS = 32
CHECK_BITS = 31
MAX_CROP = 0.1  # of a side
_KEY_STEPS = 3  # edges of windows lie at 0, 1/3, 2/3 and 3/3 of MAX_CROP
_SIDE = 64  # pixels of a side of the transformed image
_FREQUENCIES = 8  # of each axis
_FINE = 256  # interpolation points of a window along one axis
_SCALE = 1 << 12  # the transform is rounded to multiples of 1 / 4096; sums stay below 2^53, so they are exact
_UNCERTAIN, _FLIPS = 10, 2  # number of weakest signs in the prefix, and the most of them flipped at once


class Keys(NamedTuple):
    """Keys of one image. The first 32 of 63 bits must be equal in a copy.

    Attributes:
        windows: one key for each of ``windows()``; uint64 [100].
        wholes: keys for the image as a possible copy; uint64 [56].
    """

    windows: NDArray[np.uint64]
    wholes: NDArray[np.uint64]


def keys_of(picture: Image.Image) -> Keys:
    """Returns the keys of an RGB image without padding."""
    grey = picture.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    transform = _transform()
    edges = len(transform) // _FREQUENCIES
    frequencies = (transform @ np.asarray(grey, dtype=np.float64) @ transform.T).reshape(
        edges, _FREQUENCIES, edges, _FREQUENCIES
    )
    rows, columns = _order()
    values = frequencies.transpose(0, 2, 1, 3)[:, :, rows, columns].reshape(edges * edges, len(rows))
    windows = (values > 0) @ (np.uint64(1) << np.arange(len(rows) - 1, -1, -1, dtype=np.uint64))
    # The first window is the whole image.
    weakest = np.argsort(np.abs(values[0, :PREFIX_BITS]), kind="stable")[:_UNCERTAIN]
    bits = np.uint64(1) << (len(rows) - 1 - weakest).astype(np.uint64)
    return Keys(windows, windows[0] ^ (_flips() @ bits))


def prefix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the first 32 bits of keys."""
    return keys >> np.uint64(CHECK_BITS)


def different_bits(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Returns the number of different bits after the prefix."""
    return np.bitwise_count((first ^ second) & np.uint64((1 << CHECK_BITS) - 1))


@functools.cache
def windows() -> NDArray[np.float64]:
    """Returns left, right, top and bottom of each window as shares of the sides: [100, 4]."""
    return np.array([(*across, *down) for down in _edges() for across in _edges()])


def _edges() -> list[tuple[float, float]]:
    """Beginning and end of the windows along one axis; the whole image comes first."""
    step = MAX_CROP / _KEY_STEPS
    return [(a * step, 1 - b * step) for a in range(_KEY_STEPS + 1) for b in range(_KEY_STEPS + 1 - a)]


@functools.cache
def _transform() -> NDArray[np.float64]:
    """A matrix of whole numbers for interpolation and DCT of each window along one axis: [10 x 8, 64]."""
    points = (np.arange(_FINE) + 0.5) / _FINE
    cosines = np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * points)
    parts = []
    for begin, end in _edges():
        places = np.clip((begin + (end - begin) * points) * _SIDE - 0.5, 0, _SIDE - 1)
        weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(_SIDE)))
        parts.append(cosines @ weights / _FINE)
    transform: NDArray[np.float64] = np.round(np.concatenate(parts) * _SCALE * np.sqrt(_SIDE))
    return transform


@functools.cache
def _order() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the 63 frequencies, low ones first; the mean brightness is left out."""
    pairs = sorted(itertools.product(range(_FREQUENCIES), repeat=2), key=lambda pair: (sum(pair), pair))[1:]
    rows, columns = np.array(pairs).T
    return rows, columns


@functools.cache
def _flips() -> NDArray[np.uint64]:
    """All choices of flipped uncertain signs: 0 or 1, [56, 10]."""
    sets = [chosen for count in range(_FLIPS + 1) for chosen in itertools.combinations(range(_UNCERTAIN), count)]
    flips = np.zeros((len(sets), _UNCERTAIN), dtype=np.uint64)
    for row, chosen in enumerate(sets):
        flips[row, list(chosen)] = 1
    return flips


# A key, its image's number in the part, and the number of its window.
_KEY = np.dtype([("key", "<u8"), ("row", "<u4"), ("window", "u1")])
_PAIR = np.dtype([("copy", "<u4"), ("original", "<u4"), ("different", "u1"), ("window", "u1")])
_MAX_DIFFERENT = 8  # of 31 bits after the prefix: 0.5 % of pairs with an equal prefix by chance pass
# Many drawings share one prefix. An image is compared only with the nearest keys in sorted order, to bound the work.
_NEIGHBOURS = 64
_COMPARED = 512  # pairs at a time, about 100 MB
_JOINED = 1 << 16  # keys at a time, about 50 MB


class PictureWriter:
    """Collects keys and thumbnails of a part's images, and writes them if the context ends without an exception.

    Memory: 5 kB for each image, 9 kB while sorting.
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
        """Adds the next image, RGB and without padding."""
        row = len(self._thumbnails)
        self._thumbnails.append(thumbnail(picture))
        windows_of, wholes = keys_of(picture)
        # A drawing of few colours is compared as a whole and needs no other windows.
        count = 1 if has_few_colours(self._thumbnails[-1][None])[0] else len(windows_of)
        for role, keys in (("windows", windows_of[:count]), ("wholes", wholes)):
            records = np.empty(len(keys), dtype=_KEY)
            records["key"], records["row"] = keys, row
            records["window"] = np.arange(len(keys)) if role == "windows" else 0
            self._keys[role].append(records)


def write_picture_pairs(folder: Path, num_parts: int, bucket: int, num_buckets: int) -> None:
    """Writes the near duplicates found in a bucket of keys: part and row of both images, int64 [pairs, 4].

    Memory: about 6 kB / number of buckets for each image of the corpus.
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
    """Returns the pairs of all buckets: part and row of both images, int64 [pairs, 4]."""
    found = [np.load(_pair_file(folder, bucket)) for bucket in range(num_buckets)]
    pairs: NDArray[np.int64] = np.unique(np.concatenate(found), axis=0)
    return pairs


class _Pictures:
    """The images of all parts, numbered consecutively."""

    def __init__(self, folder: Path, num_parts: int) -> None:
        self.folder = folder
        # Parts of texts have no file.
        self.parts = [part for part in range(num_parts) if _thumbnail_file(folder, part).exists()]
        counts = [len(_load(_thumbnail_file(folder, part))) for part in self.parts]
        self._offsets = np.cumsum([0, *counts])

    def numbers(self, index: int, rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Converts rows of ``parts[index]`` to image numbers."""
        return (rows + self._offsets[index]).astype(np.uint32)

    def places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Converts image numbers to parts and rows."""
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
    """Sorted keys of N windows or wholes, and the numbers of their images and windows: [N] each."""

    key: NDArray[np.uint64]
    picture: NDArray[np.uint32]
    window: NDArray[np.uint8]


def _read_keys(pictures: _Pictures, role: str, bucket: int, num_buckets: int) -> _Keys:
    """Reads the keys of a bucket: the range from bucket / num_buckets to (bucket + 1) / num_buckets."""
    first, last = ((number << (PREFIX_BITS + CHECK_BITS)) // num_buckets for number in (bucket, bucket + 1))
    found = [np.empty(0, dtype=_KEY)]
    for index, part in enumerate(pictures.parts):
        keys = _load(_key_file(pictures.folder, role, part))
        # The file is memory-mapped, so only the pages of this range are read.
        begin, end = bisect.bisect_left(keys["key"], first), bisect.bisect_left(keys["key"], last)
        found.append(np.array(keys[begin:end]))
        found[-1]["row"] = pictures.numbers(index, found[-1]["row"])
    keys = np.concatenate(found)
    keys = keys[np.argsort(keys["key"], kind="stable")]
    return _Keys(*(np.ascontiguousarray(keys[name]) for name in ("key", "row", "window")))


def _meetings(wholes: _Keys, window_keys: _Keys) -> Iterator[NDArray[np.void]]:
    """Yields pairs of different images: a whole key of one and a window key of the other have equal prefixes."""
    prefixes = prefix(window_keys.key)
    for start in range(0, len(wholes.key), _JOINED):
        keys = wholes.key[start : start + _JOINED]
        low = np.searchsorted(prefixes, prefix(keys), side="left")
        high = np.searchsorted(prefixes, prefix(keys), side="right")
        nearest = np.searchsorted(window_keys.key, keys) - _NEIGHBOURS // 2
        begin = np.clip(nearest, low, np.maximum(high - _NEIGHBOURS, low))
        end = np.minimum(high, begin + _NEIGHBOURS)
        found = []
        # One pair of each whole key per pass: at most _NEIGHBOURS passes, each vectorised over all keys.
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
    """Keeps for each pair the window with the fewest different bits."""
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
