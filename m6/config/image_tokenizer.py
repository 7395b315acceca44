"""The JSON of ``m6 train-image-tokenizer``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from m6.errors import UserError
from m6.tokenizers.image.configuration import ImageTokenizerConfig
from m6.validation import Section, read_document, validate


class PictureSettings(Section):
    """Which pictures."""

    path: Path = Field(description='the data folder, made by "m6 data build"')
    sources: list[str] | None = Field(
        None, min_length=1, description="sources to read, as often as they have pictures; null: all with captions"
    )
    num_workers: int = Field(0, ge=0, description="processes that decode pictures ahead; 0: the training process")
    max_bad_row_share: float = Field(
        0.01, ge=0, le=1, description="pictures that cannot be decoded are left out; more than this share is an error"
    )


class LossSettings(Section):
    """Weights of the parts of the loss, besides the quantiser's commitment."""

    l2: NonNegativeFloat = Field(1.0, description="squared difference of pixels, with values in [-1, 1]")
    l1: NonNegativeFloat = Field(0.0, description="absolute difference of pixels")
    perceptual: NonNegativeFloat = Field(
        0.0, description="difference of features of an EfficientNet-Lite0 trained on ImageNet (arXiv 1801.03924)"
    )
    adversarial: NonNegativeFloat = Field(0.0, description="what a discriminator of patches says (arXiv 2012.09841)")
    adversarial_start_step: int = Field(0, ge=0, description="steps before the discriminator has a say")


class ImageTokenizerOptimizer(Section):
    """AdamW with a linear warm-up and a cosine to a tenth of the peak."""

    total_steps: PositiveInt = Field(description="steps of the whole run")
    batch_size: PositiveInt = Field(description="pictures of a step")
    learning_rate: PositiveFloat = Field(description="its peak")
    warmup_steps: int = Field(50, ge=0, description="steps of linear warm-up from 0")
    gradient_clipping: PositiveFloat = Field(1.0, description="largest norm of the gradient")
    seed: int = Field(0, ge=0, description="fixes weights, order of pictures and restarts of codes")


class ReportSettings(Section):
    """When the run is measured and saved."""

    interval_steps: PositiveInt = Field(500, description="steps between measurements on held-out pictures and saves")
    log_interval_steps: PositiveInt = Field(20, description="steps between lines of metrics.jsonl")
    split: str = Field("validation", description="the split that is measured")
    sheet_pictures: PositiveInt = Field(8, description="pictures of each source on the sheet")


class ImageTokenizerTraining(Section):
    """A run of ``m6 train-image-tokenizer``."""

    model: ImageTokenizerConfig
    data: PictureSettings
    loss: LossSettings = LossSettings()
    optimizer: ImageTokenizerOptimizer
    report: ReportSettings = ReportSettings()


def load_settings(path: Path, overrides: tuple[str, ...] = ()) -> ImageTokenizerTraining:
    """Reads and validates the JSON; UserError names the file and the key."""
    document = read_document(path, overrides)
    try:
        return validate(ImageTokenizerTraining, document, "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
