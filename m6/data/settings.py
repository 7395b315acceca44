"""The sections ``m6.data`` and ``m6.objectives`` of a run."""

from pathlib import Path

from pydantic import Field

from m6.decoding import Decoding
from m6.errors import UserError, nearest
from m6.validation import Section


class DataSettings(Section):
    """The data of a run, and how samples are packed into rows."""

    path: Path = Field(description='data folder, made by "m6 data build"')
    tokenizer: Path = Field(description='tokenizer folder, made by "m6 data tokenizer"')
    image_tokenizer: str | None = Field(
        default=None,
        description="folder of the image tokenizer, or its name on the Hub; drawing is learned on its codes, "
        'which "m6 data codes" makes',
    )
    sources: dict[str, float] | None = Field(
        default=None, description="relative weight of each source; absent: all sources, in proportion to their rows"
    )
    temperature: float = Field(
        default=1.0,
        ge=1,
        le=100,
        description="without sources: weights are the numbers of rows to the power of 1 / temperature; above 1, small "
        "sources are read more often",
    )
    max_epochs: float | None = Field(
        default=None,
        gt=0,
        description="how often the rows of a source are read at most in total_steps; what is beyond goes to other "
        "sources of its kind, and the run cannot become longer; absent: without limit",
    )
    sequence_length: int = Field(
        default=512, gt=0, le=2**24, description="tokens in a row, pictures and padding included"
    )
    packing: bool = Field(default=True, description="whether a row can hold several samples")
    num_workers: int = Field(
        default=2, ge=0, description="processes that prepare micro-batches; 0: the training process prepares them"
    )
    max_bad_row_share: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="the run fails if a larger share of its rows cannot be used (damaged picture, no text)",
    )


class ObjectiveSettings(Section):
    """Settings of every objective."""

    weight: float = Field(
        default=1.0, ge=0, le=10**9, description="share of samples relative to the other objectives; 0: off"
    )


class MaskingSettings(ObjectiveSettings):
    """Settings of the denoising objectives."""

    mask_ratio: float = Field(default=0.15, gt=0, lt=1, description="share of the text's tokens that are masked")
    mean_span_length: float = Field(
        default=3.0, ge=1, le=10**6, description="mean number of tokens that one <mask> replaces: 1 + Poisson(mean - 1)"
    )


class TextDenoisingSettings(MaskingSettings):
    """Settings of text denoising."""

    shuffle_sentences: bool = Field(default=True, description="whether the source has its sentences in random order")


class TaskSettings(ObjectiveSettings):
    """Settings of every fine-tuning objective."""

    weight: float = Field(
        default=0.0,
        ge=0,
        le=10**9,
        description="share of samples relative to the other objectives; 0 (the default): off",
    )


class ClassificationSettings(TaskSettings):
    """Settings of classification."""

    with_context: bool = Field(
        default=False, description="whether the row's context follows its text, as far as sequence_length allows"
    )


class DrawingSettings(TaskSettings):
    """Settings of the objectives that draw."""

    caption_dropout: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share of samples whose text is left out; classifier-free guidance (arXiv 2207.12598) needs them",
    )


class TextToImageSettings(DrawingSettings):
    """Settings of drawing from left to right."""

    code_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="largest share of the codes that are replaced by <code_mask> in the model's input (word dropout, "
        "arXiv 1511.06349); each sample draws its share from [0, code_dropout]. The model then relies "
        "more on the text",
    )


class ObjectivesSettings(Section):
    """The objectives and their shares of the samples."""

    text_denoising: TextDenoisingSettings = Field(
        default=TextDenoisingSettings(), description="masked and shuffled text -> the text"
    )
    language_modelling: ObjectiveSettings = Field(default=ObjectiveSettings(), description="nothing -> the text")
    image_captioning: ObjectiveSettings = Field(default=ObjectiveSettings(), description="picture -> its text")
    image_text_denoising: MaskingSettings = Field(
        default=MaskingSettings(), description="picture and its masked text -> the text"
    )
    text_to_image: TextToImageSettings = Field(
        default=TextToImageSettings(), description="text -> the image codes of its picture; fine-tuning"
    )
    text_classification: ClassificationSettings = Field(
        default=ClassificationSettings(), description="text -> its label; fine-tuning"
    )
    image_text_matching: TaskSettings = Field(
        default=TaskSettings(),
        description="picture and text -> whether they match; half of the texts are from other rows; fine-tuning",
    )
    image_code_denoising: DrawingSettings = Field(
        default=DrawingSettings(),
        description="text and some of the image codes of its picture -> the others, in both directions; fine-tuning",
    )
    visual_question_answering: TaskSettings = Field(
        default=TaskSettings(), description="picture and a question about it -> the answer; fine-tuning"
    )
    text_continuation: TaskSettings = Field(
        default=TaskSettings(), description="first half of a text -> the rest; fine-tuning"
    )

    @property
    def decodings(self) -> list[Decoding]:
        """The ways of decoding images trained by these objectives, the default first."""
        ways: dict[Decoding, ObjectiveSettings] = {
            "masked": self.image_code_denoising,
            "left_to_right": self.text_to_image,
        }
        return [way for way, settings in ways.items() if settings.weight > 0]

    @property
    def active(self) -> list[str]:
        """The objectives with a share of the samples."""
        return [name for name in type(self).model_fields if self.of(name).weight > 0]

    def of(self, objective: str) -> ObjectiveSettings:
        """Returns the settings of one objective; UserError for an unknown name."""
        names = list(type(self).model_fields)
        if objective not in names:
            raise UserError(f'unknown objective "{objective}"{nearest(objective, names)}')
        return getattr(self, objective)
