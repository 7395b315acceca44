"""Writes generated pictures to a folder: PNG files and ``captions.jsonl``.

Each line of ``captions.jsonl`` is ``{"file": ..., "caption": ...}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from m6.files import atomic_path, write_text

if TYPE_CHECKING:
    from PIL.Image import Image

CAPTIONS_NAME = "captions.jsonl"


def write_pictures(images: list[Image], captions: list[str], folder: Path) -> None:
    """Writes each picture as PNG, then ``captions.jsonl``, so that the list never names a missing file."""
    lines = []
    for index, (picture, caption) in enumerate(zip(images, captions, strict=True)):
        name = f"{index:05d}.png"
        with atomic_path(folder / name) as temporary:
            picture.save(temporary, format="PNG")
        lines.append(json.dumps({"file": name, "caption": caption}, ensure_ascii=False) + "\n")
    write_text(folder / CAPTIONS_NAME, "".join(lines))
