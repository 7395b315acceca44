"""The configuration of our image tokenizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from m6.errors import UserError
from m6.validation import Section


class ImageTokenizerConfig(Section):
    """A VQ autoencoder like VQGAN (arXiv 2012.09841), without its attention layers.

    The first layer folds ``patch_size`` x ``patch_size`` pixels into one position, and each further level of
    ``channels`` halves the side. The grid of codes has a side of ``image_size / (patch_size * 2 ** (len(channels) -
    1))``. A code depends only on the pixels of its own patch. Equal patches then have equal codes, and such codes are
    far easier to predict (README.md). The decoder also sees neighbouring codes.
    """

    model_type: Literal["m6_image_tokenizer"] = Field("m6_image_tokenizer", description="the format of config.json")
    image_size: PositiveInt = Field(64, le=2**14, description="side of a picture in pixels")
    patch_size: PositiveInt = Field(2, description="pixels that the first convolution folds into one position")
    channels: list[PositiveInt] = Field([64, 128], min_length=1, description="width of each level, finest first")
    num_res_blocks: PositiveInt = Field(1, description="residual blocks of each level, in encoder and decoder")
    codebook_size: PositiveInt = Field(1024, le=2**24, description="number of codes of each codebook")
    num_codebooks: PositiveInt = Field(
        1,
        le=2**8,
        description="codebooks, each for its own part of a feature; every place has one code of each, so that small "
        "codebooks say as much as a large one (product quantisation)",
    )
    codebook_dim: PositiveInt = Field(
        8, description="width of a code vector; few dimensions and unit length keep all codes in use (arXiv 2110.04627)"
    )
    codebook_decay: float = Field(0.99, gt=0, lt=1, description="decay of the codes' moving average per step")
    commitment_weight: PositiveFloat = Field(0.25, description="weight of the loss that keeps features near codes")
    dead_code_threshold: float = Field(
        0.1,
        ge=0,
        description="a code used less often per step (moving average) is replaced by a random feature of the batch",
    )

    @model_validator(mode="after")
    def _fits(self) -> ImageTokenizerConfig:
        if self.image_size % self.downsampling:
            raise UserError(
                f"image_size {self.image_size} is not a multiple of {self.downsampling}, the reduction by patch_size "
                f"{self.patch_size} and {len(self.channels)} levels"
            )
        return self

    @property
    def feature_dim(self) -> int:
        """Width of the feature of a place. Each codebook gets an equal part of it."""
        return self.num_codebooks * self.codebook_dim

    @property
    def vocab_size(self) -> int:
        """Number of codes of all codebooks."""
        return self.num_codebooks * self.codebook_size

    @property
    def downsampling(self) -> int:
        """Side in pixels of the patch of a code."""
        return self.patch_size * 2 ** (len(self.channels) - 1)

    @property
    def grid_size(self) -> int:
        """Side of the grid of codes."""
        return self.image_size // self.downsampling
