"""Nearest training pictures by pixel distance, for baselines without a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from m6.tokenizers.pictures import decode_picture

SIDE = 16  # pixels; distances at a low resolution depend on layout and colour rather than on detail
AT_ONCE = 4096  # training pictures that are compared with all queries together


def nearest_pictures(queries: Sequence[bytes], training: Iterable[bytes]) -> NDArray[np.int64]:
    """Returns for each query the index of the training picture with the least squared distance at SIDE x SIDE pixels.

    Args:
        queries: N picture files (PNG, JPEG or WebP).
        training: at least one picture file; ``AT_ONCE`` of them are in memory.

    Returns:
        [N]; the first index if several are equally near.
    """
    query_pixels, remaining = _pixels(queries), iter(training)
    nearest, least = np.zeros(len(queries), np.int64), np.full(len(queries), np.inf)
    first = 0
    while part := list(itertools.islice(remaining, AT_ONCE)):
        pixels = _pixels(part)
        # |q - t|^2 = |q|^2 - 2 q t + |t|^2; |q|^2 is the same for all t.
        distances = (pixels**2).sum(axis=1) - 2 * query_pixels @ pixels.T
        nearer = distances.min(axis=1) < least
        nearest[nearer] = first + distances.argmin(axis=1)[nearer]
        least = np.minimum(least, distances.min(axis=1))
        first += len(part)
    return nearest


def _pixels(pictures: Sequence[bytes]) -> NDArray[np.float64]:
    # Centred at 0, which reduces cancellation in the difference above.
    return np.stack([decode_picture(picture, SIDE).reshape(-1) for picture in pictures]) / 127.5 - 1
