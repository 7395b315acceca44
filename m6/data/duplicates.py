"""Finds pictures that are the same or nearly the same: resized, compressed again, or stored in another format."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree

# The search for near duplicates took 23 s for 50,000 random signatures on one core, 4.5 times as long as for 20,000. Of
# more pictures than these only equal ones are found.
MAX_COMPARED = 200_000
_GRID = 16
_CELLS = _GRID * _GRID
# Levels of 255, from 48 parts of two photographs. Stored as JPEG at quality 30 or WebP at 60, or at half or twice the
# size, cells differ by up to 5 and coarse colours by up to 7; the two most alike of different parts, both sky, by 12
# and 13. Pictures that were cropped by 2 of 160 pixels differ by 23 in the median: they are not found.
_MAX_CELL_DIFFERENCE = 8
_COARSE = 4
_MAX_COARSE_DIFFERENCE = 8
_QUERIED = 32  # colours at a time: the list of what is near each may hold all others, at 40 bytes


def signature(picture: bytes) -> NDArray[np.uint8]:
    """Returns the mean grey levels of a picture in 16 x 16 cells, and its mean colours in 4 x 4 cells: uint8 [304]."""
    with Image.open(io.BytesIO(picture)) as image:
        colours = image.convert("RGB").resize((_GRID, _GRID), Image.Resampling.BOX)
    coarse = colours.resize((_COARSE, _COARSE), Image.Resampling.BOX)
    return np.concatenate([np.asarray(colours.convert("L")).ravel(), np.asarray(coarse).ravel()])


def has_near_duplicate(signatures: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Returns which pictures have a near duplicate among others: no cell and no colour differs by more than 8 levels.

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

    Only pictures of different groups are compared, and what was found is joined before many pairs are held: the frames
    of a camera that does not move, N near duplicates, are not N^2 comparisons.

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
    """Returns the least row of each row's group: [rows]. The rows of each pair are in one group."""
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(ends), dtype=np.bool_), (ends[:, 0], ends[:, 1])), shape=(rows, rows))
    _, labels = connected_components(graph, directed=False)
    _, first, group = np.unique(labels, return_index=True, return_inverse=True)
    return first[group]


def _candidates(signatures: NDArray[np.uint8], others: NDArray[np.uint8]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields rows of pictures with the rows of all others whose coarse colours are near, if there are any.

    Equal colours are looked up once, because pictures of one scene often have them.
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
    """Returns the different coarse colours, and the rows that have each."""
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
