"""Pictures side by side in one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PIL import Image

GAP = 2


def picture_grid(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Puts pictures of one size into rows on white, in reading order; without ``columns`` about as many as rows."""
    columns = columns or math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    width, height = images[0].size
    grid = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for index, image in enumerate(images):
        grid.paste(image, ((index % columns) * (width + GAP), (index // columns) * (height + GAP)))
    return grid
