"""Decides whether one small picture shows another, or a window of it.

A photograph is laid over the window that its key names, moved until it fits best (Lucas and Kanade 1981), and compared
up to brightness and contrast. A drawing of few colours would fit too many others that way: a circle fits any circle. It
is compared as it is, without moving and with its brightness.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32  # of a thumbnail
_STEPS = 4
_MAX_STEP = 0.03  # of the side
_BEYOND = 0.01  # a window may end so far outside of the picture, for rounding
_FEW_COLOURS = 72  # of 32,768; 2,500 icons, shapes and easy-VQA drawings have up to 69, 95 % of 349 photographs more
# Of 349 photographs and their copies: the rest of a copy that was cropped by a tenth, halved and stored at quality 30
# is up to 0.17 of the contrast, 0.10 in 95 %; pictures of different things begin at 0.21.
_MAX_REST = 0.15
_MAX_DIFFERENCE = 40  # levels of 255 at one place: up to 37 in 98 % of these copies; a face with another mouth has more
_GAINS = (0.5, 2.0)
_MAX_DRAWING_DIFFERENCE = 12  # levels; up to 10 in 95 % of photographs on white that were stored again


def thumbnail(picture: Image.Image) -> NDArray[np.uint8]:
    """Returns an RGB picture without padding at 32 x 32 pixels, proportions not kept: uint8 [32, 32, 3]."""
    return np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def shows(wholes: NDArray[np.uint8], pictures: NDArray[np.uint8], windows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Decides for each of N pairs whether the first picture shows what is in a window of the second.

    Args:
        wholes: thumbnails of the possible copies, uint8 [N, 32, 32, 3].
        pictures: thumbnails of what they may show, uint8 [N, 32, 32, 3].
        windows: left, right, top and bottom of the windows as shares of the sides, [N, 4]; within 0.03.

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
    """Moves the edges of the windows until they show the copies best; grey [N, 32, 32] each, and windows [N, 4]."""
    share = (np.arange(SIDE) + 0.5) / SIDE
    edges = windows.copy()
    for _ in range(_STEPS):
        shown = _resampled(originals[..., None], edges)[..., 0]
        gain, rest = _rest(shown[..., None], copies[..., None])
        down, across = np.gradient(shown, axis=(1, 2))
        across *= (gain * SIDE / (edges[:, 1] - edges[:, 0]))[:, None, None]
        down *= (gain * SIDE / (edges[:, 3] - edges[:, 2]))[:, None, None]
        # How the brightness of each point changes with each edge, and with contrast and brightness of the whole.
        moves = (across * (1 - share), across * share, down * (1 - share)[:, None], down * share[:, None])
        effects = np.stack([*moves, shown, np.ones_like(shown)], axis=-1).reshape(-1, SIDE * SIDE, 6)
        transposed = effects.transpose(0, 2, 1)
        normal = transposed @ effects
        # Keeps the solution finite where a picture says nothing about an edge.
        slight = 1e-3 * (1 + np.trace(normal[:, :4, :4], axis1=1, axis2=2) / 4)
        normal += slight[:, None, None] * np.diag([1, 1, 1, 1, 0, 0]) + 1e-3 * np.eye(6)
        step = np.linalg.solve(normal, transposed @ rest.reshape(-1, SIDE * SIDE, 1))[:, :4, 0]
        edges = np.clip(edges + np.clip(step, -_MAX_STEP, _MAX_STEP), -_BEYOND, 1 + _BEYOND)
    return edges


def _resampled(pictures: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """What windows [N, 4] of pictures [N, 32, 32, C] show, interpolated linearly to 32 x 32 pixels."""
    across, down = _weights(edges[:, 0], edges[:, 1]), _weights(edges[:, 2], edges[:, 3])
    channels = pictures.transpose(3, 0, 1, 2)
    shown: NDArray[np.float64] = (down @ channels @ across.transpose(0, 2, 1)).transpose(1, 2, 3, 0)
    return shown


def _weights(begin: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each pixel of one axis contributes to each of 32 points between two edges: [N, 32, 32]."""
    places = begin[:, None] + (end - begin)[:, None] * (np.arange(SIDE) + 0.5) / SIDE
    places = np.clip(places * SIDE - 0.5, 0, SIDE - 1)
    return np.maximum(0, 1 - np.abs(places[:, :, None] - np.arange(SIDE)))


def _rest(shown: NDArray[np.float64], copies: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fits contrast and brightness of all channels together: the gain [N], and what it leaves [N, 32, 32, C]."""
    places = (1, 2, 3)
    centred = shown - shown.mean(axis=places, keepdims=True)
    wanted = copies - copies.mean(axis=places, keepdims=True)
    gain = (centred * wanted).sum(axis=places) / np.maximum((centred**2).sum(axis=places), 1e-6)
    return gain, wanted - gain[:, None, None, None] * centred


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weighs each pixel with its neighbours, 1 to 2 to 1 on both axes: resizing makes edges differ. [N, 32, 32, C]."""
    padded = np.pad(values, ((0, 0), (1, 1), (1, 1), (0, 0)), "edge")
    padded = (padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]) / 4
    smooth: NDArray[np.float64] = (padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]) / 4
    return smooth


def has_few_colours(thumbnails: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Whether thumbnails [N, 32, 32, 3] are of drawings of few colours, with 32 levels of each channel: [N]."""
    codes = (thumbnails // 8).astype(np.int32).reshape(-1, SIDE * SIDE, 3) @ np.array([1024, 32, 1], np.int32)
    codes.sort(axis=1)
    few: NDArray[np.bool_] = (np.diff(codes, axis=1) != 0).sum(axis=1) + 1 < _FEW_COLOURS
    return few
