"""Writes generated pictures to a folder: PNG files and ``captions.jsonl``.

Each line of ``captions.jsonl`` is ``{"file": ..., "caption": ...}``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from m6.lock import new_folder

if TYPE_CHECKING:
    from PIL.Image import Image

CAPTIONS_NAME = "captions.jsonl"


def write_pictures(images: list[Image], captions: list[str], folder: Path) -> None:
    """Writes the pictures as PNG and ``captions.jsonl`` to a folder that does not exist or is empty: all or nothing."""
    lines = []
    with new_folder(folder.absolute()) as partial:
        for index, (picture, caption) in enumerate(zip(images, captions, strict=True)):
            name = f"{index:05d}.png"
            picture.save(partial / name, format="PNG")
            lines.append(json.dumps({"file": name, "caption": caption}, ensure_ascii=False) + "\n")
        (partial / CAPTIONS_NAME).write_text("".join(lines), encoding="utf-8")
