"""Generated pictures, as ``m6.generation.folder`` or another program writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m6.data.pictures import decode_batch
from m6.data.sources.local import resolve_inside
from m6.errors import UserError
from m6.generation.folder import CAPTIONS_NAME


@dataclass(frozen=True)
class CaptionedPictures:
    """Pictures uint8 ``[n, H, H, 3]`` and their n captions."""

    pixels: np.ndarray
    captions: list[str]

    def __len__(self) -> int:
        return len(self.captions)

    def where(self, chosen: list[bool]) -> CaptionedPictures:
        """The chosen ones, in order."""
        captions = [caption for caption, keep in zip(self.captions, chosen, strict=True) if keep]
        return CaptionedPictures(self.pixels[np.array(chosen, dtype=bool)], captions)


def load_generated(folder: Path, image_size: int) -> tuple[CaptionedPictures, dict[str, str]]:
    """The pictures of a folder at ``image_size``, and the files that cannot be used with the reason.

    Raises:
        UserError: no ``captions.jsonl``, a line without ``file`` and ``caption``, or no usable picture.
    """
    manifest = folder / CAPTIONS_NAME
    if not manifest.is_file():
        raise UserError(f'{manifest}: no such file; "m6 generate --out-dir {folder}" writes it')
    files: list[str] = []
    captions: list[str] = []
    for number, line in enumerate(manifest.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            file, caption = entry["file"], entry["caption"]
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f'{manifest}:{number}: expected {{"file": ..., "caption": ...}}, found {line[:80]}'
            ) from None
        files.append(str(file))
        captions.append(str(caption))
    paths = [resolve_inside(folder, file) for file in files]
    contents = [path.read_bytes() if path is not None else None for path in paths]
    pixels, good, bad = decode_batch(contents, image_size)
    skipped = {files[place]: reason for place, reason in bad.items()}
    empty = {place for place in good if not captions[place].strip()}
    skipped |= {files[place]: "empty caption" for place in empty}
    found = CaptionedPictures(pixels, [captions[place] for place in good])
    found = found.where([place not in empty for place in good])
    if not len(found):
        raise UserError(
            f"{folder}: no picture can be used; the last: {', '.join(list(skipped.items())[-1]) if skipped else 'none'}"
        )
    return found, skipped
