"""How well pictures come back, and how much of the codebook they use."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from m6.data.pictures import PictureSet, to_unit_range
from m6.formatting import markdown_table
from m6.tokenizers.image.base import ImageTokenizer

MEASURED_AT_ONCE = 64
_MIN_MSE = 1e-6  # a picture that comes back exactly counts as 60 dB


def psnr(pixels: Tensor, reference: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each picture in dB: ``[B, 3, H, H]`` in [0, 1] to ``[B]``."""
    return psnr_of_mse((pixels - reference).square().flatten(1).mean(1))


def psnr_of_mse(mse: Tensor) -> Tensor:
    """The same of mean squared errors."""
    return -10 * mse.clamp_min(_MIN_MSE).log10()


class CodebookUse:
    """Counts codes: the share that occurs at all, and the perplexity of their distribution."""

    def __init__(self, codebook_size: int) -> None:
        self.counts = torch.zeros(codebook_size, dtype=torch.int64)

    def add(self, codes: Tensor) -> None:
        self.counts += torch.bincount(codes.flatten().cpu(), minlength=len(self.counts))

    @property
    def usage(self) -> float:
        return (self.counts > 0).double().mean().item()

    @property
    def perplexity(self) -> float:
        """exp of the entropy: the number of codes that, used evenly, would say as much."""
        share = self.counts[self.counts > 0].double() / self.counts.sum()
        return math.exp(-(share * share.log()).sum().item())


@dataclass(frozen=True)
class SourceMeasures:
    """Means over the pictures of a source."""

    pictures: int
    psnr_db: float
    ssim: float


@dataclass(frozen=True)
class Measures:
    """Means over all pictures, and of each source; usage and perplexity are of all pictures together."""

    pictures: int
    psnr_db: float
    ssim: float
    codebook_usage: float
    codebook_perplexity: float
    bad_pictures: int
    sources: dict[str, SourceMeasures]

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> str:
        """The measures of the sources in Markdown."""
        measures = {**self.sources, "all": SourceMeasures(self.pictures, self.psnr_db, self.ssim)}
        rows = [[name, f"{row.pictures:,}", f"{row.psnr_db:.2f}", f"{row.ssim:.3f}"] for name, row in measures.items()]
        return markdown_table(["held-out pictures", "number", "PSNR (dB)", "SSIM"], rows)


@torch.no_grad()
def measure(tokenizer: ImageTokenizer, pictures: PictureSet, device: torch.device) -> Measures:
    """Encodes and decodes a whole set; SSIM is that of Wang et al. (2004) with a Gaussian window."""
    from torchmetrics.functional.image import structural_similarity_index_measure as ssim

    use = CodebookUse(tokenizer.codebook_size)
    values: dict[str, list[Tensor]] = {source: [] for source in pictures.sizes}
    num_bad = 0
    for first in range(0, len(pictures), MEASURED_AT_ONCE):
        batch = pictures.read(range(first, min(first + MEASURED_AT_ONCE, len(pictures))))
        num_bad += len(batch.bad)
        if not batch.rows:
            continue
        pixels = to_unit_range(batch.pixels, device)
        codes = tokenizer.encode(pixels)
        decoded = tokenizer.decode(codes)
        use.add(codes)
        similarity = cast(Tensor, ssim(decoded, pixels, data_range=1.0, reduction="none"))
        found = torch.stack([psnr(decoded, pixels), similarity], dim=1).double().cpu()
        for row, value in zip(batch.rows, found, strict=True):
            values[pictures.locate(row)[0]].append(value)
    stacked = {source: torch.stack(rows) for source, rows in values.items() if rows}
    every = torch.cat(list(stacked.values()))
    return Measures(
        pictures=len(every),
        psnr_db=every[:, 0].mean().item(),
        ssim=every[:, 1].mean().item(),
        codebook_usage=use.usage,
        codebook_perplexity=use.perplexity,
        bad_pictures=num_bad,
        sources={
            source: SourceMeasures(len(rows), rows[:, 0].mean().item(), rows[:, 1].mean().item())
            for source, rows in stacked.items()
        },
    )
