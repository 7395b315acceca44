"""Finds pictures that are the same or nearly the same: resized, compressed again, or stored in another format."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial import KDTree

_GRID = 16
# Levels of 255, from 48 parts of two photographs. Stored as JPEG at quality 30 or WebP at 60, or at half or twice the
# size, cells differ by up to 5 and coarse colours by up to 7; the two most alike of different parts, both sky, by 12
# and 13. Pictures that were cropped by 2 of 160 pixels differ by 23 in the median: they are not found.
_MAX_CELL_DIFFERENCE = 8
_COARSE = 4
_MAX_COARSE_DIFFERENCE = 8


def signature(picture: bytes) -> NDArray[np.uint8]:
    """Returns the mean grey levels of a picture in 16 x 16 cells, and its mean colours in 4 x 4 cells: uint8 [304]."""
    with Image.open(io.BytesIO(picture)) as image:
        colours = image.convert("RGB").resize((_GRID, _GRID), Image.Resampling.BOX)
    coarse = colours.resize((_COARSE, _COARSE), Image.Resampling.BOX)
    return np.concatenate([np.asarray(colours.convert("L")).ravel(), np.asarray(coarse).ravel()])


def near_duplicates(signatures: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Yields pairs of near duplicates.

    Args:
        signatures: [N, 304], of ``signature``.

    Yields:
        (i, j), i < j: no cell and no coarse colour differs by more than 8 levels.
    """
    if len(signatures) < 2:
        return
    coarse = signatures[:, _GRID * _GRID :].astype(np.float32)
    tree = KDTree(coarse)
    for first, candidates in enumerate(tree.query_ball_point(coarse, _MAX_COARSE_DIFFERENCE, p=np.inf)):
        later = np.array([other for other in candidates if other > first], dtype=np.int64)
        if len(later):
            cells = signatures[:, : _GRID * _GRID]
            differences = np.abs(cells[later].astype(np.int16) - cells[first]).max(axis=1)
            yield from ((first, int(other)) for other in later[differences <= _MAX_CELL_DIFFERENCE])
