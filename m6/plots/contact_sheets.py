"""Sheets of the small pictures that the record of a corpus keeps."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from m6.data.corpus.tally import Sample
from m6.files import atomic_path

_CELL = 96  # pixels; pictures of the record are no larger
_GAP = 8
_COLUMNS = 10  # pictures, or half as many pairs


def write_sheet(samples: Sequence[Sample], out: Path) -> None:
    """Writes a PNG of the pictures of samples, in rows; beside each copy is what was kept instead.

    Args:
        samples: samples with pictures.
        out: the PNG file.
    """
    cells = [[each.picture] if each.kept_picture is None else [each.picture, each.kept_picture] for each in samples]
    width = max(map(len, cells))
    columns = min(_COLUMNS // width, len(cells))
    rows = math.ceil(len(cells) / columns)
    step = width * _CELL + _GAP
    sheet = Image.new("RGB", (columns * step - _GAP, rows * (_CELL + _GAP) - _GAP), "white")
    for number, cell in enumerate(cells):
        for place, picture in enumerate(cell):
            if picture is not None:
                corner = (number % columns * step + place * _CELL, number // columns * (_CELL + _GAP))
                sheet.paste(Image.open(io.BytesIO(base64.b64decode(picture))), corner)
    with atomic_path(out) as temporary:
        sheet.quantize(256).save(temporary, "PNG", optimize=True)
