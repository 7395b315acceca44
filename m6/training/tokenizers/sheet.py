"""Draws sheets of pictures as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from m6.data.pictures import PictureSet, to_bytes, to_unit_range
from m6.files import atomic_path
from m6.tokenizers.image.base import ImageTokenizer

_GAP = 2  # pixels between pictures


def draw_sheet(tokenizer: ImageTokenizer, pictures: PictureSet, per_source: int, path: Path) -> None:
    """Draws a row of pictures of each source above a row of their reconstructions.

    Args:
        per_source: pictures in a row.
        path: the PNG file.
    """
    rows: list[np.ndarray] = []
    first = 0
    for size in pictures.sizes.values():
        # Evenly spaced over the source, whose rows may be sorted.
        chosen = np.linspace(first, first + size - 1, min(per_source, size), dtype=int).tolist()
        first += size
        batch = pictures.read(chosen)
        if batch.rows:
            device = next(tokenizer.parameters()).device
            decoded = tokenizer.decode(tokenizer.encode(to_unit_range(batch.pixels, device)))
            rows += [batch.pixels, to_bytes(decoded)]
    write_grid(rows, path)


def write_grid(rows: Sequence[np.ndarray], path: Path) -> None:
    """Writes rows of pictures, each uint8 ``[n, H, H, 3]``, on a white background into one PNG file."""
    side = rows[0].shape[1] + _GAP
    sheet = np.full((len(rows) * side + _GAP, max(map(len, rows)) * side + _GAP, 3), 255, np.uint8)
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            top, left = y * side + _GAP, x * side + _GAP
            sheet[top : top + len(picture), left : left + len(picture)] = picture
    with atomic_path(path) as temporary:
        Image.fromarray(sheet).save(temporary, "PNG", optimize=True)
