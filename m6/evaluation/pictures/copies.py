"""Are generated pictures copies of training pictures?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from m6.evaluation.pictures.generated import CaptionedPictures
from m6.evaluation.reconstruction import psnr_of_mse

COPY_PSNR_DB = 24.0  # as near as a good reconstruction: from there on a picture repeats what it was trained on
_BATCH_SIZE = 512


@dataclass(frozen=True)
class Nearest:
    """For n pictures the nearest of a set: its place, and the PSNR between the two in dB, both ``[n]``."""

    place: np.ndarray
    psnr_db: np.ndarray

    @property
    def copies(self) -> float:
        """Share of the pictures whose nearest is at COPY_PSNR_DB or above."""
        return float((self.psnr_db >= COPY_PSNR_DB).mean())


def find_nearest(pictures: CaptionedPictures, among: CaptionedPictures) -> Nearest:
    """Compares every picture with every one of ``among``, by the squared difference of pixels."""
    found = _flat(pictures.pixels)
    best = torch.full((len(found),), torch.inf)
    place = torch.zeros(len(found), dtype=torch.int64)
    for first in range(0, len(among), _BATCH_SIZE):
        distance, index = torch.cdist(found, _flat(among.pixels[first : first + _BATCH_SIZE])).min(dim=1)
        nearer = distance < best
        best = torch.where(nearer, distance, best)
        place = torch.where(nearer, index + first, place)
    mse = best.double().square() / found.shape[1]
    return Nearest(place.numpy(), psnr_of_mse(mse).numpy())


def _flat(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).flatten(1).float() / 255
