"""Reads a folder of generated images, in the format of ``m6.generation.grid``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m6.data.pictures import decode_batch
from m6.data.sources.local import unreadable_reason
from m6.errors import UserError
from m6.files import parse_object, read_lines
from m6.generation.grid import CAPTIONS_NAME


@dataclass(frozen=True)
class CaptionedPictures:
    """Images uint8 ``[n, H, H, 3]`` and their n captions."""

    pixels: np.ndarray
    captions: list[str]

    def __len__(self) -> int:
        return len(self.captions)

    def where(self, mask: list[bool]) -> CaptionedPictures:
        """Returns the images where ``mask`` is True, in order."""
        captions = [caption for caption, keep in zip(self.captions, mask, strict=True) if keep]
        return CaptionedPictures(self.pixels[np.array(mask, dtype=bool)], captions)


def load_generated(folder: Path, image_size: int) -> tuple[CaptionedPictures, dict[str, str]]:
    """Loads the images of a folder.

    Args:
        folder: folder with images and ``captions.jsonl``.
        image_size: side of the resized images in pixels.

    Returns:
        The images, and the reason for each unusable file.

    Raises:
        UserError: ``captions.jsonl`` is missing, a line has no ``file`` or ``caption``, or no image is usable.
    """
    manifest = folder / CAPTIONS_NAME
    if not manifest.is_file():
        raise UserError(f'{manifest}: no such file; "m6 generate --out-dir {folder}" writes it')
    files: list[str] = []
    captions: list[str] = []
    for number, line in enumerate(read_lines(manifest), start=1):
        if not line:
            continue
        try:
            entry = parse_object(line)
            file, caption = entry["file"], entry["caption"]
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f'{manifest}:{number}: expected {{"file": ..., "caption": ...}}, found {line[:80]}'
            ) from None
        files.append(str(file))
        captions.append(str(caption))
    # The list may come from another program: its names must not lead out of the folder.
    paths = [folder / file if unreadable_reason(folder, folder / file) is None else None for file in files]
    contents = [path.read_bytes() if path is not None else None for path in paths]
    pixels, good, bad = decode_batch(contents, image_size)
    skipped = {files[index]: reason for index, reason in bad.items()}
    empty = {index for index in good if not captions[index].strip()}
    skipped |= {files[index]: "empty caption" for index in empty}
    usable = CaptionedPictures(pixels, [captions[index] for index in good])
    usable = usable.where([index not in empty for index in good])
    if not len(usable):
        raise UserError(
            f"{folder}: no picture can be used; the last: {', '.join(list(skipped.items())[-1]) if skipped else 'none'}"
        )
    return usable, skipped
