"""Images with captions: a folder of generated ones, and the real ones of a data folder."""

from __future__ import annotations

import collections
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m6.data.manifest import Manifest
from m6.data.pictures import decode_batch, picture_sources
from m6.data.reader import open_split
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


MIN_PICTURES = 2  # of a caption; from a single image the judge would learn the drawing, not the concept


@dataclass(frozen=True)
class RealPictures:
    """Three sets of real images.

    Attributes:
        judged: training set of the judge: the training and validation splits without the held-out style, restricted to
            captions with at least MIN_PICTURES images. Validation adds captions without training images for the
            generator.
        held_out: test set of the judge, with captions of ``judged``: the test split, and the held-out style of the
            other splits. The generator may have been trained on this style.
        training: training split of the sources, to search for copies.
    """

    judged: CaptionedPictures
    held_out: CaptionedPictures
    training: CaptionedPictures

    @property
    def seen(self) -> set[str]:
        """Captions of the training split."""
        return set(self.training.captions)


def load_real(
    manifest: Manifest,
    sources: Sequence[str] | None,
    held_out_style: str | None,
    image_size: int,
    among: Set[str] | None = None,
) -> RealPictures:
    """Reads the images of the sources. Undecodable images are left out.

    Args:
        manifest: manifest of the data folder.
        sources: names of the sources; None for all with images and captions.
        held_out_style: a style to keep out of ``judged``: the last part of a row's id, such as ``twemoji`` in
            ``emoji/1f407/twemoji``. None: no style is held out.
        image_size: side of a decoded image in pixels.
        among: captions allowed as classes of the judge; None: all.

    Raises:
        UserError: a source is unknown or has no images, no row has the style, or a set is empty.
    """
    rows: dict[str, list[tuple[str, str, np.ndarray]]] = {"train": [], "validation": [], "test": []}
    for source in picture_sources(manifest, sources):
        for split, rows_of_split in rows.items():
            if manifest.split(source, split).rows:
                rows_of_split += _read(manifest, source, split, image_size)
    known = rows["train"] + rows["validation"]
    has_style = [held_out_style is not None and id.rpartition("/")[2] == held_out_style for id, _, _ in known]
    if held_out_style is not None and not any(has_style):
        styles = collections.Counter(id.rpartition("/")[2] for id, _, _ in known)
        common = ", ".join(style for style, _ in styles.most_common(8))
        raise UserError(f'--held-out-style: no id ends in "/{held_out_style}"; frequent ends: {common}')
    judged = [row for row, style in zip(known, has_style, strict=True) if not style]
    counts = collections.Counter(caption for _, caption, _ in judged)
    classes = {caption for caption, count in counts.items() if count >= MIN_PICTURES}
    classes = classes if among is None else classes & among
    held_out = [row for row, style in zip(known, has_style, strict=True) if style] + rows["test"]
    real = RealPictures(
        judged=_set([row for row in judged if row[1] in classes], image_size),
        held_out=_set([row for row in held_out if row[1] in classes], image_size),
        training=_set(rows["train"], image_size),
    )
    if not len(real.judged) or not len(real.held_out):
        raise UserError(
            f"{manifest.folder}: {len(real.judged)} of {len(known)} pictures have a caption to judge that occurs at "
            f"least {MIN_PICTURES} times, and {len(real.held_out)} with such a caption are held out; both numbers must "
            "be positive (--held-out-style names a drawing style to hold out)"
        )
    if not len(real.training):
        raise UserError(
            f'{manifest.folder}: no picture of its sources is in the split "train"; expected pictures that a generator '
            "was trained on, among which copies are looked for"
        )
    return real


def _read(manifest: Manifest, source: str, split: str, image_size: int) -> list[tuple[str, str, np.ndarray]]:
    rows = open_split(manifest, source, split)
    pixels, good, _ = decode_batch(rows.column("image"), image_size)
    ids, captions = rows.column("id"), rows.column("text")
    return [(ids[place], captions[place], picture) for place, picture in zip(good, pixels, strict=True)]


def _set(rows: list[tuple[str, str, np.ndarray]], image_size: int) -> CaptionedPictures:
    pixels = (
        np.stack([picture for _, _, picture in rows]) if rows else np.empty((0, image_size, image_size, 3), np.uint8)
    )
    return CaptionedPictures(pixels, [caption for _, caption, _ in rows])
