"""Quality of an image tokenizer: PSNR and SSIM of reconstructions, and usage of the codebook."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from m6.data.pictures import PictureSet, to_unit_range
from m6.formatting import markdown_table
from m6.tokenizers.image.base import ImageTokenizer

_BATCH_SIZE = 64
_MIN_MSE = 1e-6  # limits the PSNR of an exact reconstruction to 60 dB, to keep means finite


def psnr(pixels: Tensor, reference: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio of each image in dB, for ``[B, 3, H, H]`` in [0, 1]."""
    return psnr_of_mse((pixels - reference).square().flatten(1).mean(1))


def psnr_of_mse(mse: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio in dB for mean squared errors of values in [0, 1]."""
    return -10 * mse.clamp_min(_MIN_MSE).log10()


class CodebookUse:
    """Counts the uses of each code of a codebook."""

    def __init__(self, codebook_size: int) -> None:
        self.counts = torch.zeros(codebook_size, dtype=torch.int64)

    def add(self, codes: Tensor) -> None:
        """Counts codes of any shape."""
        self.counts += torch.bincount(codes.flatten().cpu(), minlength=len(self.counts))

    @property
    def usage(self) -> float:
        """Share of the codes that occurred at least once."""
        return (self.counts > 0).double().mean().item()

    @property
    def perplexity(self) -> float:
        """exp of the entropy of the codes: the size of a uniformly used codebook with the same entropy."""
        share = self.counts[self.counts > 0].double() / self.counts.sum()
        return math.exp(-(share * share.log()).sum().item())


@dataclass(frozen=True)
class SourceMeasures:
    """Means over the images of one source."""

    pictures: int
    psnr_db: float
    ssim: float


@dataclass(frozen=True)
class Measures:
    """Means over all images, and per source. Usage and perplexity are over all images together."""

    pictures: int
    psnr_db: float
    ssim: float
    codebook_usage: float
    codebook_perplexity: float
    bad_pictures: int
    sources: dict[str, SourceMeasures]

    def document(self) -> dict[str, Any]:
        """Returns the measures as a JSON object."""
        return asdict(self)

    def table(self) -> str:
        """Returns the measures per source, and of all, as a Markdown table."""
        measures = {**self.sources, "all": SourceMeasures(self.pictures, self.psnr_db, self.ssim)}
        rows = [[name, f"{row.pictures:,}", f"{row.psnr_db:.2f}", f"{row.ssim:.3f}"] for name, row in measures.items()]
        return markdown_table(["held-out pictures", "number", "PSNR (dB)", "SSIM"], rows)


@torch.no_grad()
def measure(tokenizer: ImageTokenizer, pictures: PictureSet, device: torch.device) -> Measures:
    """Encodes and decodes all images of a set and compares them with the originals.

    SSIM follows Wang et al. (2004) with a Gaussian window.

    Args:
        tokenizer: image tokenizer in evaluation mode, on ``device``.
        pictures: the set; undecodable images are counted.
        device: device of the tokenizer.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure as ssim

    use = CodebookUse(tokenizer.codebook_size)
    # Kept per image: a batch can contain images of several sources.
    values: dict[str, list[Tensor]] = {source: [] for source in pictures.sizes}
    num_bad = 0
    for first in range(0, len(pictures), _BATCH_SIZE):
        batch = pictures.read(range(first, min(first + _BATCH_SIZE, len(pictures))))
        num_bad += len(batch.bad)
        if not batch.rows:
            continue
        pixels = to_unit_range(batch.pixels, device)
        codes = tokenizer.encode(pixels)
        decoded = tokenizer.decode(codes)
        use.add(codes)
        similarity = cast(Tensor, ssim(decoded, pixels, data_range=1.0, reduction="none"))
        measured = torch.stack([psnr(decoded, pixels), similarity], dim=1).double().cpu()
        for row, value in zip(batch.rows, measured, strict=True):
            values[pictures.locate(row)[0]].append(value)
    stacked = {source: torch.stack(rows) for source, rows in values.items() if rows}
    combined = torch.cat(list(stacked.values()))
    return Measures(
        pictures=len(combined),
        psnr_db=combined[:, 0].mean().item(),
        ssim=combined[:, 1].mean().item(),
        codebook_usage=use.usage,
        codebook_perplexity=use.perplexity,
        bad_pictures=num_bad,
        sources={
            source: SourceMeasures(len(rows), rows[:, 0].mean().item(), rows[:, 1].mean().item())
            for source, rows in stacked.items()
        },
    )
