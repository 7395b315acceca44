"""Sampling of image codes: settings, and random numbers of an image.

The settings need no torch, so that a wrong value on the command line is told at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, get_args

import numpy as np

from m6.decoding import TEMPERATURE, Decoding, temperature_refusal
from m6.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 1000.0  # with larger guidance logits could overflow


class CodeGrid(Protocol):
    """The sizes of an image tokenizer's codes; see ``ImageTokenizer`` for the attributes."""

    codebook_size: int
    codes_per_place: int
    num_codes: int


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling a code from the model's logits.

    Attributes:
        guidance_scale: g in ``unconditional + g * (conditional - unconditional)``, classifier-free guidance (arXiv
            2207.12598). 1 is no guidance, and no unconditional logits are computed.
        temperature: divides the logits; 0 takes the most likely code. None: the model's temperature, see
            ``resolve_sampling``, or else ``m6.decoding.TEMPERATURE``.
        top_k: samples from the k most likely codes; None: from all.
        top_p: samples from the smallest set of codes with a total probability of at least p; None: from all.
        decoding: "masked": all codes at once, in several passes; "left_to_right": one after the other. None: the
            decoding of the model's training; masked if it was trained for both.
        passes: passes of the model for an image with "masked", see ``m6.generation.drawing``; None: 12.

    Raises:
        UserError: a value is out of range, or ``passes`` is given with "left_to_right". The latter is also checked when
            ``resolve_sampling`` chooses the decoding.
    """

    guidance_scale: float = 2.0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    decoding: Decoding | None = None
    passes: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.guidance_scale <= _LARGEST:
            raise UserError(f"guidance_scale must be from 0 to {_LARGEST:g}, found {self.guidance_scale}")
        if (refusal := temperature_refusal(self.effective_temperature)) is not None:
            raise UserError(f"temperature {refusal}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, found {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], found {self.top_p}")
        if self.decoding not in (None, *get_args(Decoding)):
            raise UserError(f'decoding "{self.decoding}" is unknown{nearest(str(self.decoding), get_args(Decoding))}')
        if self.num_passes < 1:
            raise UserError(f"passes must be at least 1, found {self.passes}")
        if self.passes is not None and self.decoding == "left_to_right":
            raise UserError(
                f"passes {self.passes} is for the decoding masked; left_to_right draws one code after the other"
            )

    @property
    def num_passes(self) -> int:
        """Passes of the model for an image with "masked"."""
        return 12 if self.passes is None else self.passes

    @property
    def effective_temperature(self) -> float:
        """The temperature, or its default."""
        return TEMPERATURE if self.temperature is None else self.temperature

    @property
    def is_guided(self) -> bool:
        """Whether unconditional logits are needed."""
        return self.guidance_scale != 1

    def sources(self, captions: Sequence[str]) -> list[str]:
        """Returns the sources of a batch for B captions: with guidance, followed by B empty ones."""
        return [*captions, *([""] * len(captions) if self.is_guided else [])]

    def guide(self, scores: Tensor) -> Tensor:
        """Applies guidance to the logits of ``sources``: [B or 2 B, ...] to [B, ...]."""
        if not self.is_guided:
            return scores
        conditional, unconditional = scores.chunk(2)
        return unconditional + self.guidance_scale * (conditional - unconditional)

    def tempered(self, scores: Tensor) -> Tensor:
        """Divides logits by the temperature, in fp64; at temperature 0 they stay as they are."""
        # In fp64 the rounding of the cumulative sums in draw_by_numbers hardly ever changes a code.
        return scores.double() / (self.effective_temperature or 1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """Maps logits [B, K] to the sampling distribution of codes, fp64 [B, K]."""
        import torch
        from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

        scores = self.tempered(scores)
        if self.effective_temperature == 0:
            return torch.nn.functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).double()
        ids = torch.empty(0, device=scores.device)  # required by these warpers, but not used
        scores = TopKLogitsWarper(self.top_k)(ids, scores) if self.top_k is not None else scores
        scores = TopPLogitsWarper(self.top_p)(ids, scores) if self.top_p is not None else scores
        return scores.softmax(dim=-1)


def uniform_numbers(seed: int, caption: str, index: int, number: int) -> Tensor:
    """Returns the random numbers of one image, fp64 [number] in [0, 1).

    They depend only on the arguments, not on the device or on other images, to make the image reproducible.

    Args:
        seed: any integer.
        caption: caption of the image.
        index: index of the image among the images of the caption.
        number: number of random numbers.
    """
    import torch

    digest = hashlib.blake2b(f"{seed}/{index}/{caption}".encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    # Drawn in fp32: the product with the fp64 sum of all probabilities is then always less than the sum.
    return torch.from_numpy(generator.random(number, dtype=np.float32)).double()


def draw_by_numbers(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Samples codes int64 [B] by inverse transform from probabilities [B, K] and random numbers [B].

    A code of probability 0 is never drawn: the cumulative sum does not grow there.
    """
    import torch

    sums = probabilities.cumsum(dim=-1)
    return torch.searchsorted(sums, (uniform * sums[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
