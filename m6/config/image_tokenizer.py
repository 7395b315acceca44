"""The JSON of ``m6 train-image-tokenizer``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from m6.architecture.image_tokenizer import ImageTokenizerConfig
from m6.errors import UserError
from m6.shipped import shipped_file
from m6.validation import Section, read_document, validate

# The smallest side of a picture from which the networks of the loss compute a feature.
_SMALLEST_SIDES = {"perceptual": 16, "adversarial": 8}


class PictureSettings(Section):
    """The pictures to train on."""

    path: Path = Field(description='the data folder, made by "m6 data build"')
    sources: list[str] | None = Field(
        None,
        min_length=1,
        description="sources to read, in proportion to their pictures; null: all sources with captions",
    )
    num_workers: int = Field(
        0, ge=0, description="processes that decode pictures in advance; 0: the training process decodes them"
    )
    max_bad_row_share: float = Field(
        0.01,
        ge=0,
        le=1,
        description="largest share of pictures that cannot be decoded and are left out; a larger share is an error",
    )


class LossSettings(Section):
    """Weights of the terms of the loss; the commitment loss of the quantiser is always added."""

    l2: NonNegativeFloat = Field(1.0, description="squared difference of pixels, with values in [-1, 1]")
    l1: NonNegativeFloat = Field(0.0, description="absolute difference of pixels")
    perceptual: NonNegativeFloat = Field(
        0.0, description="difference of the features of an EfficientNet-Lite0 trained on ImageNet (arXiv 1801.03924)"
    )
    adversarial: NonNegativeFloat = Field(
        0.0, description="loss of the generator against a patch discriminator (arXiv 2012.09841)"
    )
    adversarial_start_step: int = Field(0, ge=0, description="first step that uses the discriminator")


class ImageTokenizerOptimizer(Section):
    """Muon for the convolutions of residual blocks and AdamW for all else, of which a discriminator is a part.

    The learning rate rises linearly, then falls by a cosine to a tenth of the peak.
    """

    total_steps: PositiveInt = Field(le=10**12, description="optimizer steps of the whole run")
    batch_size: PositiveInt = Field(le=10**6, description="pictures per step")
    learning_rate: PositiveFloat = Field(description="peak learning rate")
    warmup_steps: int = Field(50, ge=0, description="steps of linear warm-up: 1 / n, 2 / n, ... of the peak")
    gradient_clipping: PositiveFloat = Field(1.0, description="largest norm of the gradient")
    seed: int = Field(0, ge=0, description="determines initial weights, order of pictures and restarts of codes")


class AutocastSettings(Section):
    """Convolutions of the autoencoder in 16 bits, as with the key of the same name of a DeepSpeed JSON."""

    enabled: bool = Field(False, description="whether convolutions compute in ``dtype``; all else stays in fp32")
    dtype: Literal["bfloat16"] = Field("bfloat16", description="the type of the products")


class ReportSettings(Section):
    """Intervals of measurements, saves and log lines."""

    interval_steps: PositiveInt = Field(500, description="steps between measurements on held-out pictures and saves")
    log_interval_steps: PositiveInt = Field(20, description="steps between lines of metrics.jsonl")
    split: str = Field("validation", description="data split for the measurements")
    sheet_pictures: PositiveInt = Field(8, description="pictures of each source in the sheet of reconstructions")


class ImageTokenizerTraining(Section):
    """The settings of ``m6 train-image-tokenizer``."""

    model: ImageTokenizerConfig
    data: PictureSettings
    loss: LossSettings = LossSettings()
    optimizer: ImageTokenizerOptimizer
    torch_autocast: AutocastSettings = AutocastSettings()
    report: ReportSettings = ReportSettings()

    @model_validator(mode="after")
    def _fits(self) -> ImageTokenizerTraining:
        for name, side in _SMALLEST_SIDES.items():
            if getattr(self.loss, name) and self.model.image_size < side:
                raise UserError(
                    f"loss.{name} needs a model.image_size of at least {side}, found {self.model.image_size}"
                )
        return self


def load_settings(path: Path, overrides: tuple[str, ...] = ()) -> ImageTokenizerTraining:
    """Reads and validates the JSON of an image tokenizer.

    Args:
        path: the JSON file, or the name of a shipped one.
        overrides: see ``m6.validation.read_document``.

    Raises:
        UserError: the file or a key is wrong; the message names both.
    """
    path = shipped_file(path, "image tokenizer")
    document = read_document(path, overrides)
    try:
        return validate(ImageTokenizerTraining, document, "")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
