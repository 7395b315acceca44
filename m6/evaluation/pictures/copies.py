"""Search for copies of training images among generated ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from m6.evaluation.pictures.generated import CaptionedPictures
from m6.evaluation.reconstruction import psnr_of_mse

COPY_PSNR_DB = 24.0  # PSNR of a good reconstruction; from this PSNR to a training image on, an image is a copy
_BATCH_SIZE = 512


@dataclass(frozen=True)
class Nearest:
    """The nearest image of a set for each of n images: its index ``[n]``, and the PSNR to it in dB ``[n]``."""

    place: np.ndarray
    psnr_db: np.ndarray

    @property
    def copies(self) -> float:
        """Share of the images with a PSNR of at least COPY_PSNR_DB to the nearest image."""
        return float((self.psnr_db >= COPY_PSNR_DB).mean())


def find_nearest(pictures: CaptionedPictures, among: CaptionedPictures) -> Nearest:
    """Finds the nearest image of ``among`` for each image, by the squared difference of pixels."""
    queries = _flat(pictures.pixels)
    best = torch.full((len(queries),), torch.inf)
    place = torch.zeros(len(queries), dtype=torch.int64)
    # In batches: for a large set the matrix of all distances would not fit into memory.
    for first in range(0, len(among), _BATCH_SIZE):
        distance, index = torch.cdist(queries, _flat(among.pixels[first : first + _BATCH_SIZE])).min(dim=1)
        nearer = distance < best
        best = torch.where(nearer, distance, best)
        place = torch.where(nearer, index + first, place)
    mse = best.double().square() / queries.shape[1]
    return Nearest(place.numpy(), psnr_of_mse(mse).numpy())


def _flat(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).flatten(1).float() / 255
