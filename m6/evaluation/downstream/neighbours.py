"""The nearest training picture: what looking at pixels alone gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m6.tokenizers.processor import decode_picture

SIDE = 16


def nearest_pictures(queries: Sequence[bytes], training: Sequence[bytes]) -> NDArray[np.int64]:
    """Of each query the index of the training picture with the least squared distance, at SIDE x SIDE pixels.

    Args:
        queries: N pictures (PNG, JPEG or WebP).
        training: M pictures.

    Returns:
        [N]; the first of equally near ones.
    """
    known, asked = _pixels(training), _pixels(queries)
    # |q - t|^2 = |q|^2 - 2 q t + |t|^2, and |q|^2 changes no order.
    distances = (known**2).sum(axis=1) - 2 * asked @ known.T
    return distances.argmin(axis=1)


def _pixels(pictures: Sequence[bytes]) -> NDArray[np.float64]:
    # Centred, so that the differences of squares keep their digits.
    return np.stack([decode_picture(picture, SIDE).reshape(-1) for picture in pictures]) / 127.5 - 1
