"""Draws sheets of reconstructed images as PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from m6.data.pictures import PictureSet, to_bytes, to_unit_range
from m6.files import atomic_path
from m6.generation.grid import picture_grid
from m6.tokenizers.image.base import ImageTokenizer


def draw_sheet(tokenizer: ImageTokenizer, pictures: PictureSet, per_source: int, path: Path) -> None:
    """Draws a row of images of each source above a row of their reconstructions.

    Args:
        per_source: number of images in a row.
        path: the PNG file.
    """
    rows: dict[str, np.ndarray] = {}
    first = 0
    for source, size in pictures.sizes.items():
        # Evenly spaced, because the rows of a source may be sorted.
        chosen = np.linspace(first, first + size - 1, min(per_source, size), dtype=int).tolist()
        first += size
        batch = pictures.read(chosen)
        if batch.rows:
            device = next(tokenizer.parameters()).device
            decoded = tokenizer.decode(tokenizer.encode(to_unit_range(batch.pixels, device)))
            rows |= {source: batch.pixels, f"{source}, reconstructed": to_bytes(decoded)}
    sheet = picture_grid([[Image.fromarray(picture) for picture in row] for row in rows.values()], list(rows))
    with atomic_path(path) as temporary:
        sheet.save(temporary, "PNG", optimize=True)
