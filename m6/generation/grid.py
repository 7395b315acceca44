"""Grids of pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image

GAP = 2  # pixels between pictures


def picture_grid(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Arranges pictures of equal size in a grid on white, row by row; the grid is about square without ``columns``."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = images[0].size
    grid = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for index, image in enumerate(images):
        grid.paste(image, ((index % columns) * (width + GAP), (index // columns) * (height + GAP)))
    return grid
