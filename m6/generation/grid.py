"""Writes generated images as a grid with captions on the left, or as a folder of PNG files.

The folder also holds ``captions.jsonl``, with a line ``{"file": ..., "caption": ...}`` for each image.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from m6.fonts import chinese_font
from m6.lock import new_folder

CAPTIONS_NAME = "captions.jsonl"


def write_pictures(images: list[Image.Image], captions: list[str], folder: Path) -> None:
    """Writes images as PNG and ``captions.jsonl`` to a new or empty folder: all or nothing."""
    lines = []
    with new_folder(folder.absolute()) as partial:
        for index, (picture, caption) in enumerate(zip(images, captions, strict=True)):
            name = f"{index:05d}.png"
            picture.save(partial / name, format="PNG")
            lines.append(json.dumps({"file": name, "caption": caption}, ensure_ascii=False) + "\n")
        (partial / CAPTIONS_NAME).write_text("".join(lines), encoding="utf-8")


GAP = 2  # pixels between images
_MARGIN = 6  # pixels at the left and right of a caption
_CAPTION_EMS = 12  # longest line of a caption, in widths of a Chinese character
_COLOUR = "#202020"
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def picture_grid(rows: Sequence[Sequence[Image.Image]], captions: Sequence[str] = ()) -> Image.Image:
    """Arranges images of equal size on white.

    Args:
        rows: images from left to right, rows from top to bottom.
        captions: a text for each row, written at its left and cut to the height of the row; or none.
    """
    width, height = rows[0][0].size
    font = _font(height)
    texts = [_wrapped(caption, font, height) for caption in captions]
    margin = max((math.ceil(_extent(text, font)) + 2 * _MARGIN for text in texts), default=0)
    columns = max(map(len, rows))
    size = (margin + columns * (width + GAP) - GAP, len(rows) * (height + GAP) - GAP)
    grid = Image.new("RGB", size, "white")
    for y, row in enumerate(rows):
        for x, picture in enumerate(row):
            grid.paste(picture, (margin + x * (width + GAP), y * (height + GAP)))
    draw = ImageDraw.Draw(grid)
    for y, text in enumerate(texts):
        draw.multiline_text((_MARGIN, y * (height + GAP) + height / 2), text, _COLOUR, font, anchor="lm", spacing=0)
    return grid


def in_rows(pictures: Sequence[Image.Image], columns: int | None = None) -> list[Sequence[Image.Image]]:
    """Splits images into rows of ``columns``; None: about square."""
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    return [pictures[begin : begin + columns] for begin in range(0, len(pictures), columns)]


def _font(height: int) -> Font:
    size = min(max(height // 5, 11), 24)  # legible, and four lines for an image of 64 pixels
    path = chinese_font()
    return ImageFont.load_default(size) if path is None else ImageFont.truetype(path, size)


def _wrapped(text: str, font: Font, height: int) -> str:
    """Breaks a text into lines and cuts it to the height of a row.

    Lines break at any Chinese character, between Latin words, and inside words longer than a line.
    """
    limit = _CAPTION_EMS * font.getlength("国")
    lines = [""]
    parts = re.findall(r"[!-~]+|\s+|.", text)
    for part in itertools.chain(*(part if font.getlength(part) > limit else [part] for part in parts)):
        if lines[-1] and font.getlength(lines[-1] + part) > limit:
            lines.append("")
        lines[-1] = (lines[-1] + part).lstrip()
    shown = max(1, int(height // font.getbbox("国j")[3]))
    return "\n".join(lines if len(lines) <= shown else [*lines[: shown - 1], f"{lines[shown - 1]}…"])


def _extent(text: str, font: Font) -> float:
    return max(font.getlength(line) for line in text.split("\n"))
