"""Nearest training pictures by pixel distance, for baselines without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m6.tokenizers.pictures import decode_picture

SIDE = 16  # pixels; distances at a low resolution depend on layout and colour rather than on detail


def nearest_pictures(queries: Sequence[bytes], training: Sequence[bytes]) -> NDArray[np.int64]:
    """Returns for each query the index of the training picture with the least squared distance at SIDE x SIDE pixels.

    Args:
        queries: N picture files (PNG, JPEG or WebP).
        training: M picture files.

    Returns:
        [N]; the first index if several are equally near.
    """
    training_pixels, query_pixels = _pixels(training), _pixels(queries)
    # |q - t|^2 = |q|^2 - 2 q t + |t|^2; |q|^2 is the same for all t.
    distances = (training_pixels**2).sum(axis=1) - 2 * query_pixels @ training_pixels.T
    return distances.argmin(axis=1)


def _pixels(pictures: Sequence[bytes]) -> NDArray[np.float64]:
    # Centred at 0, which reduces cancellation in the difference above.
    return np.stack([decode_picture(picture, SIDE).reshape(-1) for picture in pictures]) / 127.5 - 1
