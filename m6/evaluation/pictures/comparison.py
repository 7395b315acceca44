"""Comparison of two sets of images: FID and KID on features of the judge or of Inception, and a search for copies."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from m6.errors import UserError, first_line
from m6.evaluation.pictures.captioned import CaptionedPictures
from m6.evaluation.reconstruction import psnr_of_mse

KID_SUBSETS, KID_SUBSET_SIZE = 50, 100
_BATCH_SIZE = 64


@dataclass(frozen=True)
class Distances:
    """FID (arXiv 1706.08500), and mean and standard deviation of KID (arXiv 1801.01401) over random subsets."""

    fid: float
    kid: float
    kid_std: float


class _PrecomputedFeatures(nn.Module):
    """Identity in place of torchmetrics' feature network: the features are precomputed."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def distances_of_features(found: Tensor, expected: Tensor, seed: int = 0) -> Distances:
    """Computes FID and KID between two sets of features.

    Args:
        found: features of the generated images, ``[n, F]`` with n at least 2.
        expected: features of the real images, ``[m, F]`` with m at least 2.
        seed: seed of KID's random subsets.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    identity = _PrecomputedFeatures(found.shape[1])
    fid = FrechetInceptionDistance(feature=identity)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # KID warns that it stores all features
        size = min(KID_SUBSET_SIZE, len(found), len(expected))
        kid = KernelInceptionDistance(feature=identity, subsets=KID_SUBSETS, subset_size=size)
    for metric in (fid, kid):
        metric.update(expected, real=True)
        metric.update(found, real=False)
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        mean, deviation = kid.compute()
    return Distances(fid.compute().item(), mean.item(), deviation.item())


def open_inception(weights: Path) -> nn.Module:
    """Opens Inception-v3 in the version of FID's authors, with 2,048 features.

    Args:
        weights: file ``weights-inception-2015-12-05-6726825d.pth`` of torch-fidelity, provided by the user.

    Raises:
        UserError: torch-fidelity is not installed, or the file does not contain these weights.
    """
    from torchmetrics.image.fid import NoTrainInceptionV3

    try:
        # torch-fidelity unpickles the file without weights_only. This could run code, so the file is checked first.
        torch.load(weights, map_location="cpu", weights_only=True)
        return NoTrainInceptionV3("inception-v3-compat", ["2048"], str(weights))
    except ModuleNotFoundError:
        raise UserError("--inception needs torch-fidelity: pip install torch-fidelity") from None
    except Exception as error:  # torch.load and load_state_dict raise many types for a wrong file
        raise UserError(f"{weights}: not the weights of Inception: {first_line(error)}") from None


def distances_by_inception(found: CaptionedPictures, expected: CaptionedPictures, network: nn.Module) -> Distances:
    """Computes FID and KID of generated images to real ones on the features of ``open_inception``."""
    return distances_of_features(_apply(network, found), _apply(network, expected))


def _apply(network: nn.Module, pictures: CaptionedPictures) -> Tensor:
    pixels = torch.from_numpy(pictures.pixels).permute(0, 3, 1, 2)
    return torch.cat([network(batch) for batch in pixels.split(_BATCH_SIZE)])


COPY_PSNR_DB = 24.0  # PSNR of a good reconstruction; from this PSNR to a training image on, an image is a copy
_IMAGES_AT_ONCE = 512


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
    for first in range(0, len(among), _IMAGES_AT_ONCE):
        distance, index = torch.cdist(queries, _flat(among.pixels[first : first + _IMAGES_AT_ONCE])).min(dim=1)
        nearer = distance < best
        best = torch.where(nearer, distance, best)
        place = torch.where(nearer, index + first, place)
    mse = best.double().square() / queries.shape[1]
    return Nearest(place.numpy(), psnr_of_mse(mse).numpy())


def _flat(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels).flatten(1).float() / 255
