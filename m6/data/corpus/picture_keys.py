"""Keys of a picture by which copies meet: resized, compressed again, or cropped by up to a tenth of each side.

A key holds the signs of 63 low frequencies (DCT) of the grey picture, as perceptual hashes do. A crop changes most of
them. So a picture gets a key for each of 100 windows that a copy may show of it, and as a copy it gets the key of its
whole with the uncertain signs in both states: 56 keys. A picture and a copy of it share the first 32 signs of one key
of each kind, and most others. All sums are of whole numbers, so keys are equal on every processor.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PREFIX_BITS = 32
CHECK_BITS = 31
MAX_CROP = 0.1  # of a side
_STEPS = 3  # edges of windows are at 0, 1/3, 2/3 and 3/3 of MAX_CROP
_SIDE = 64  # pixels of the picture that is transformed
_FREQUENCIES = 8  # of each axis
_FINE = 256  # points of a window at which its picture is interpolated
_SCALE = 1 << 12  # the transform is rounded to multiples of 1 / 4096, and the sums stay below 2^53
_UNCERTAIN, _FLIPS = 10, 2  # of the weakest signs of the prefix, at most so many are flipped at once


class Keys(NamedTuple):
    """Keys of one picture. The first 32 of 63 bits must be equal in a copy.

    Attributes:
        windows: key of each of ``windows()``; uint64 [100].
        wholes: keys of the picture as a copy; uint64 [56].
    """

    windows: NDArray[np.uint64]
    wholes: NDArray[np.uint64]


def keys_of(picture: Image.Image) -> Keys:
    """Returns the keys of an RGB picture without padding."""
    grey = picture.convert("L").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    transform = _transform()
    edges = len(transform) // _FREQUENCIES
    frequencies = (transform @ np.asarray(grey, dtype=np.float64) @ transform.T).reshape(
        edges, _FREQUENCIES, edges, _FREQUENCIES
    )
    rows, columns = _order()
    values = frequencies.transpose(0, 2, 1, 3)[:, :, rows, columns].reshape(edges * edges, len(rows))
    windows = (values > 0) @ (np.uint64(1) << np.arange(len(rows) - 1, -1, -1, dtype=np.uint64))
    # The first window is the whole picture.
    weakest = np.argsort(np.abs(values[0, :PREFIX_BITS]), kind="stable")[:_UNCERTAIN]
    bits = np.uint64(1) << (len(rows) - 1 - weakest).astype(np.uint64)
    return Keys(windows, windows[0] ^ (_flips() @ bits))


def prefix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the first 32 bits of keys."""
    return keys >> np.uint64(CHECK_BITS)


def different_bits(first: NDArray[np.uint64], second: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Returns the number of bits after the prefix that differ."""
    return np.bitwise_count((first ^ second) & np.uint64((1 << CHECK_BITS) - 1))


@functools.cache
def windows() -> NDArray[np.float64]:
    """Returns left, right, top and bottom of each window as shares of the sides: [100, 4]."""
    return np.array([(*across, *down) for down in _edges() for across in _edges()])


def _edges() -> list[tuple[float, float]]:
    """Beginning and end of the windows on one axis, that of the whole picture first."""
    step = MAX_CROP / _STEPS
    return [(a * step, 1 - b * step) for a in range(_STEPS + 1) for b in range(_STEPS + 1 - a)]


@functools.cache
def _transform() -> NDArray[np.float64]:
    """Interpolates each window of one axis and transforms it: whole numbers [10 x 8, 64]."""
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
    """Which of the uncertain signs are flipped: [56, 10]."""
    sets = [chosen for count in range(_FLIPS + 1) for chosen in itertools.combinations(range(_UNCERTAIN), count)]
    flips = np.zeros((len(sets), _UNCERTAIN), dtype=np.uint64)
    for row, chosen in enumerate(sets):
        flips[row, list(chosen)] = 1
    return flips
