"""Batches of decoded images of a data folder."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m6.data.manifest import Manifest
from m6.data.order import RowOrder
from m6.data.reader import Rows, open_sources
from m6.errors import UserError
from m6.tokenizers.pictures import decode_picture

MIN_PICTURES_FOR_SHARE = 200  # least denominator of the share of bad images, so a single early one is no error


@dataclass(frozen=True)
class Pictures:
    """A batch of images.

    Attributes:
        pixels: uint8 ``[B, H, H, 3]``.
        rows: rows of the B images in their set.
        bad: ``source:id: reason`` of each undecodable image.
    """

    pixels: np.ndarray
    rows: list[int]
    bad: list[str]


class PictureSet:
    """The images of one split of several sources, one source after the other.

    The set can be pickled: each process opens the data files itself when it first reads from them.

    Args:
        manifest: manifest of the data folder.
        sources: names of the sources; None for all with images and captions.
        split: name of the split.
        image_size: side of a decoded image in pixels.

    Raises:
        UserError: a source is unknown or has no images, or the split is empty.
    """

    def __init__(self, manifest: Manifest, sources: Sequence[str] | None, split: str, image_size: int) -> None:
        self.manifest, self.split, self.image_size = manifest, split, image_size
        self.sizes = {name: manifest.split(name, split).rows for name in picture_sources(manifest, sources)}
        if not len(self):
            raise UserError(f'{manifest.folder}: the sources {", ".join(self.sizes)} have no rows in split "{split}"')
        self._rows: Rows | None = None

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def locate(self, row: int) -> tuple[str, int]:
        """Returns the source of a row of the set, and the row's number in that source."""
        for source, size in self.sizes.items():
            if row < size:
                return source, row
            row -= size
        raise IndexError(row)

    def read(self, rows: Sequence[int]) -> Pictures:
        """Decodes rows of the set. Undecodable images are left out and listed in ``bad``."""
        opened = self.opened()
        values = [opened[row] for row in rows]
        pixels, good, problems = decode_batch([value["image"] for value in values], self.image_size)
        bad = [f"{self.locate(rows[index])[0]}:{values[index]['id']}: {reason}" for index, reason in problems.items()]
        return Pictures(pixels, [rows[index] for index in good], bad)

    def opened(self) -> Rows:
        """The set's rows, with the columns ``id`` and ``image``."""
        if self._rows is None:
            self._rows = open_sources(self.manifest, list(self.sizes), self.split, ["id", "image"])
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        # Cached rows are not sent to workers.
        return self.__dict__ | {"_rows": None}


class TrainingBatches(torch.utils.data.Dataset[Pictures | UserError]):
    """Training batches by number. Batch n depends only on n and the seed; each epoch is a permutation of the set.

    If a UserError ends the preparation of a batch, the error is returned in its place.
    """

    def __init__(self, pictures: PictureSet, batch_size: int, seed: int) -> None:
        self._pictures, self._batch_size = pictures, batch_size
        self._order = RowOrder(pictures.opened().block_sizes, functools.partial(operator.add, seed))

    def __getitem__(self, number: int) -> Pictures | UserError:
        positions = range(number * self._batch_size, (number + 1) * self._batch_size)
        try:
            return self._pictures.read([self._order.row(position) for position in positions])
        except UserError as error:
            return error


class BadPictures:
    """Counts bad images, and raises if there are too many."""

    def __init__(self, max_share: float) -> None:
        self.num_bad = self._num_read = 0
        self._max_share = max_share

    def count(self, pictures: Pictures) -> None:
        """Counts a batch.

        Raises:
            UserError: more than ``max_share`` of all images so far are bad, or all images of this batch.
        """
        self.num_bad += len(pictures.bad)
        self._num_read += len(pictures.bad) + len(pictures.rows)
        if not pictures.rows or self.num_bad > self._max_share * max(self._num_read, MIN_PICTURES_FOR_SHARE):
            raise UserError(
                f"{self.num_bad} of {self._num_read} pictures are bad (data.max_bad_row_share is {self._max_share}); "
                f"the last: {', '.join(pictures.bad[-3:])}"
            )


def picture_sources(manifest: Manifest, sources: Sequence[str] | None) -> list[str]:
    """Returns the named sources, or all with images and captions.

    Raises:
        UserError: a source is unknown or has no images, or there is no source of images.
    """
    names = list(sources or (name for name, entry in manifest.sources.items() if entry.kind == "image_text"))
    for name in names:
        manifest.split(name, "train")  # raises for an unknown name
        if manifest.sources[name].kind in ("text", "labelled_text"):
            raise UserError(f'{manifest.folder}: source "{name}" holds texts, no pictures')
    if not names:
        raise UserError(f"{manifest.folder} holds no source of pictures with captions")
    return names


def decode_batch(images: Sequence[bytes | None], image_size: int) -> tuple[np.ndarray, list[int], dict[int, str]]:
    """Decodes image files.

    Args:
        images: contents of the files; None for a missing one.
        image_size: side H in pixels.

    Returns:
        uint8 pixels ``[B, H, H, 3]`` of the B good images, their indices in ``images``, and the reasons by index of
        bad images.
    """
    pixels, good, bad = [], [], {}
    for index, image in enumerate(images):
        if image is None:
            bad[index] = "missing image"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                pixels.append(decode_picture(image, image_size))
            good.append(index)
        except (Image.DecompressionBombWarning, Image.DecompressionBombError):
            bad[index] = "image too large"
        except Exception as error:  # Pillow raises OSError, SyntaxError, struct.error and more for damaged bytes
            # Only the type: some messages contain a memory address, so reports would differ between runs.
            bad[index] = f"damaged image ({type(error).__name__})"
    return np.stack(pixels) if pixels else np.empty((0, image_size, image_size, 3), np.uint8), good, bad


def to_unit_range(pixels: np.ndarray, device: torch.device) -> Tensor:
    """Converts uint8 ``[B, H, H, 3]`` to fp32 ``[B, 3, H, H]`` with values in [0, 1]."""
    return torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2).float().contiguous() / 255


def to_bytes(pixels: Tensor) -> np.ndarray:
    """Converts values in [0, 1], ``[B, 3, H, H]``, to uint8 ``[B, H, H, 3]``, rounded to the nearest integer."""
    return (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
