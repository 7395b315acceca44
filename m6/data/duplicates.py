"""Finds pictures that are the same or nearly the same: resized, compressed again, or stored in another format."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.spatial import KDTree

# The search for near duplicates took 23 s for 50,000 random signatures on one core, 4.5 times as long as for 20,000. Of
# more pictures than these only equal ones are found.
MAX_COMPARED = 200_000
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


def near_duplicates(signatures: NDArray[np.uint8], others: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """Yields the pairs of near duplicates between two sets of pictures, which may be the same.

    Args:
        signatures: [N, 304], of ``signature``, N > 0.
        others: [M, 304], M > 0.

    Yields:
        (i, j): no cell and no coarse colour differs by more than 8 levels.
    """
    cells = _GRID * _GRID
    tree = KDTree(others[:, cells:].astype(np.float32))
    found = tree.query_ball_point(signatures[:, cells:].astype(np.float32), _MAX_COARSE_DIFFERENCE, p=np.inf)
    for first, candidates in enumerate(found):
        near = np.array(candidates, dtype=np.int64)
        differences = np.abs(others[near, :cells].astype(np.int16) - signatures[first, :cells]).max(axis=1, initial=0)
        yield from ((first, int(other)) for other in near[differences <= _MAX_CELL_DIFFERENCE])
