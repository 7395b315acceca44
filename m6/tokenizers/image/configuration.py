"""The shape of an image tokenizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from m6.errors import UserError
from m6.validation import Section


class ImageTokenizerConfig(Section):
    """A VQ autoencoder in the manner of VQGAN (arXiv 2012.09841), without its attention layers.

    Pictures are folded by ``patch_size``, and each further level of ``channels`` halves the side, so that the grid of
    codes has a side of ``image_size / (patch_size * 2 ** (len(channels) - 1))``. A code depends on the pixels that it
    stands for and on no others: equal pixels then have equal codes, which are far easier to predict (README.md). The
    decoder sees neighbours.
    """

    model_type: Literal["m6_image_tokenizer"] = Field("m6_image_tokenizer", description="the format of config.json")
    image_size: PositiveInt = Field(64, description="side of a picture in pixels")
    patch_size: PositiveInt = Field(2, description="pixels that the first convolution folds into one position")
    channels: list[PositiveInt] = Field([64, 128], min_length=1, description="width of each level, finest first")
    num_res_blocks: PositiveInt = Field(1, description="residual blocks of each level, in encoder and decoder")
    codebook_size: PositiveInt = Field(1024, description="number of codes")
    codebook_dim: PositiveInt = Field(
        8, description="width of a code; small and of unit length, so that all are used (arXiv 2110.04627)"
    )
    codebook_decay: float = Field(0.99, gt=0, lt=1, description="decay of the codes' moving average per step")
    commitment_weight: PositiveFloat = Field(0.25, description="weight of the loss that keeps features near codes")
    dead_code_threshold: float = Field(
        0.1, ge=0, description="a code whose moving average of uses per step falls below it becomes a feature at random"
    )

    @model_validator(mode="after")
    def _fits(self) -> ImageTokenizerConfig:
        if self.image_size % self.downsampling:
            raise UserError(
                f"image_size {self.image_size} is not a multiple of {self.downsampling}, by which patch_size "
                f"{self.patch_size} and {len(self.channels)} levels reduce it"
            )
        return self

    @property
    def downsampling(self) -> int:
        """Pixels of a side for each code."""
        return self.patch_size * 2 ** (len(self.channels) - 1)

    @property
    def grid_size(self) -> int:
        """Codes of a side."""
        return self.image_size // self.downsampling
