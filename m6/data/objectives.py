"""The objectives of M6 (arXiv 2103.00823): from a row to a source and a target.

Of pretraining, section 3.3:

    text_denoising        corrupted text            -> the text
    language_modelling    nothing                   -> the text
    image_captioning      picture                   -> the text
    image_text_denoising  picture + corrupted text  -> the text

The paper does not give the mixing ratio, the mask ratio or the span lengths, so these are settings; corruption
follows BART (arXiv 1910.13461): spans of tokens are replaced by one ``<mask>`` each, sentences are shuffled.

Of fine-tuning, off unless a run gives them a weight; they mix with those of pretraining:

    text_to_image         text                      -> <boi>, the codes of its picture, <eoi>
    text_classification   text                      -> its label
    image_text_matching   picture + a text          -> whether the text is the picture's
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import Field

from m6.data.corruption import hide, mask_spans, shuffle_sentences
from m6.errors import UserError, nearest
from m6.tokenizers.text import M6Tokenizer
from m6.validation import Section

# A shorter text leaves nothing to learn from: a mask and a few tokens around it.
MIN_TEXT_TOKENS = 8
# Space that is kept for an answer; a longer one makes a bad row.
MAX_ANSWER_TOKENS = 16
# The answers of image_text_matching.
MATCH, NO_MATCH = "是", "不是"


class ObjectiveSettings(Section):
    """What every objective has."""

    weight: float = Field(
        default=1.0, ge=0, description="share of samples relative to the other objectives; 0 turns it off"
    )


class MaskingSettings(ObjectiveSettings):
    """What every denoising objective has."""

    mask_ratio: float = Field(default=0.15, gt=0, lt=1, description="share of the text's tokens that are masked")
    mean_span_length: float = Field(
        default=3.0, ge=1, description="mean tokens behind one <mask>: 1 + Poisson(mean - 1)"
    )


class TextDenoisingSettings(MaskingSettings):
    """Text denoising."""

    shuffle_sentences: bool = Field(default=True, description="whether the source holds the sentences in random order")


class TaskSettings(ObjectiveSettings):
    """What every objective of fine-tuning has."""

    weight: float = Field(default=0.0, ge=0, description="as of the others; off unless given")


class TextToImageSettings(TaskSettings):
    """Text-to-image."""

    caption_dropout: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="share of samples without their text, from which classifier-free guidance (arXiv 2207.12598) "
        "learns what any picture looks like",
    )
    code_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="the largest share of a picture's codes that <mask> hides from the model while it learns to write "
        "them, each sample with a share of its own (word dropout, arXiv 1511.06349); so it learns to look at the text "
        "and the rows above, and not at the codes just before alone",
    )


class ObjectivesSettings(Section):
    """The objectives and their shares."""

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
    text_classification: TaskSettings = Field(default=TaskSettings(), description="text -> its label; fine-tuning")
    image_text_matching: TaskSettings = Field(
        default=TaskSettings(),
        description="picture and its text, or as often another row's -> whether they belong together; fine-tuning",
    )

    def of(self, objective: str) -> ObjectiveSettings:
        """The settings of one objective; UserError for an unknown name."""
        if objective not in OBJECTIVES:
            raise UserError(f'unknown objective "{objective}"{nearest(objective, OBJECTIVES)}')
        return getattr(self, objective)


class BadRow(ValueError):
    """A row that an objective cannot use; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of a data set."""

    id: str
    text: str
    image: bytes | None = None
    question: str | None = None
    answer: str | None = None
    codes: Sequence[int] | None = None
    """of the picture, in ``[0, image_vocab_size)``"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One training sequence ``[<image> x P]? + source_ids + <bos> + target_ids + <eos>``.

    Attributes:
        read_ids: what the model reads in the target ids' places where that differs from what it has to write.
        weights: loss weights of the target ids and of ``<eos>`` (so one more than target_ids); None: all 1.
    """

    source_ids: list[int]
    target_ids: list[int]
    read_ids: list[int] | None = None
    image: bytes | None = None
    weights: list[float] | None = None
    objective_id: int = 0


def _text(sample: Sample, ids: list[int], tokenizer: M6Tokenizer) -> list[int]:
    return ids


def _codes(sample: Sample, ids: list[int], tokenizer: M6Tokenizer) -> list[int]:
    if sample.codes is None:
        raise BadRow("no image codes")
    codes = map(tokenizer.image_code_to_id, sample.codes)
    return [tokenizer.boi_token_id, *codes, tokenizer.eoi_token_id]


def _answer(sample: Sample, ids: list[int], tokenizer: M6Tokenizer) -> list[int]:
    answer = tokenizer.encode_ids(sample.answer or "", MAX_ANSWER_TOKENS + 1)
    if not answer:
        raise BadRow("no answer")
    if len(answer) > MAX_ANSWER_TOKENS:
        raise BadRow(f"the answer has more than {MAX_ANSWER_TOKENS} tokens")
    return answer


def _in_sight(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> None:
    return None


def _codes_hidden(
    ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: TextToImageSettings
) -> list[int] | None:
    if settings.code_dropout == 0:
        return None
    boi, *codes, eoi = ids
    return [boi, *hide(codes, rng, share=rng.uniform(0, settings.code_dropout), mask_id=tokenizer.mask_token_id), eoi]


@dataclass(frozen=True)
class _Objective:
    kind: str
    """The kind of source it reads, as in the manifest."""
    make_source: Callable[[list[int], np.random.Generator, M6Tokenizer, Any], list[int]]
    """(text ids, random numbers, tokenizer, settings) -> source ids"""
    make_target: Callable[[Sample, list[int], M6Tokenizer], list[int]] = _text
    """(row, its text ids, tokenizer) -> target ids"""
    hide_target: Callable[[list[int], np.random.Generator, M6Tokenizer, Any], list[int] | None] = _in_sight
    """(target ids, random numbers, tokenizer, settings) -> what is read in their places, if that is something else"""
    has_pixels: bool = False
    """Whether the patches of the picture come first."""
    num_texts: int = 1
    """How often the text stands in an example, at most."""
    is_paired: bool = False
    """Whether its rows are paired with other rows' texts first, by ``pair``."""

    @property
    def has_codes(self) -> bool:
        return self.make_target is _codes

    @property
    def has_answer(self) -> bool:
        return self.make_target is _answer


def _nothing(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> list[int]:
    return []


def _whole(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> list[int]:
    return ids


def _masked(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: MaskingSettings) -> list[int]:
    return mask_spans(
        ids,
        rng,
        mask_ratio=settings.mask_ratio,
        mean_span_length=settings.mean_span_length,
        mask_id=tokenizer.mask_token_id,
    )


def _masked_and_shuffled(
    ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: TextDenoisingSettings
) -> list[int]:
    if settings.shuffle_sentences:
        ids = shuffle_sentences(ids, rng, tokenizer)
    return _masked(ids, rng, tokenizer, settings)


def _unless_dropped(
    ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: TextToImageSettings
) -> list[int]:
    return [] if rng.random() < settings.caption_dropout else ids


_REGISTRY: dict[str, _Objective] = {
    "text_denoising": _Objective("text", _masked_and_shuffled, num_texts=2),
    "language_modelling": _Objective("text", _nothing),
    "image_captioning": _Objective("image_text", _nothing, has_pixels=True),
    "image_text_denoising": _Objective("image_text", _masked, has_pixels=True, num_texts=2),
    "text_to_image": _Objective("image_text", _unless_dropped, _codes, _codes_hidden),
    "text_classification": _Objective("labelled_text", _whole, _answer),
    "image_text_matching": _Objective("image_text", _whole, _answer, has_pixels=True, is_paired=True),
}
OBJECTIVES: tuple[str, ...] = tuple(_REGISTRY)


def source_kind(objective: str) -> str:
    """The kind of source that an objective reads: "text", "image_text" or "labelled_text"."""
    return _REGISTRY[objective].kind


def reads_codes(objective: str) -> bool:
    """Whether an objective needs the image codes of its rows."""
    return _REGISTRY[objective].has_codes


def is_paired(objective: str) -> bool:
    """Whether an objective's rows have to be paired first, by ``pair``."""
    return _REGISTRY[objective].is_paired


def pair(sample: Sample, other_text: str, rng: np.random.Generator) -> Sample:
    """The picture of a row with its own text or, as often, with another row's, and the answer to whether they match."""
    text = sample.text if rng.random() < 0.5 else other_text
    return replace(sample, text=text, answer=MATCH if text == sample.text else NO_MATCH)


def max_text_tokens(objective: str, sequence_length: int, num_patches: int, num_codes: int = 0) -> int:
    """Tokens of a text such that its example is no longer than ``sequence_length``.

    Args:
        num_patches: of a picture that is read.
        num_codes: of a picture that is written.
    """
    space = sequence_length - 2  # <bos> and <eos>
    if _REGISTRY[objective].has_pixels:
        space -= num_patches
    if _REGISTRY[objective].has_codes:
        space -= num_codes + 2  # <boi> and <eoi>
    if _REGISTRY[objective].has_answer:
        space -= MAX_ANSWER_TOKENS
    return space // _REGISTRY[objective].num_texts


def target_ids(objective: str, sample: Sample, tokenizer: M6Tokenizer, max_tokens: int) -> list[int]:
    """What an objective's model has to write about a row, without ``<bos>`` and ``<eos>``.

    Raises:
        BadRow: when the text is empty, or the objective needs image codes or an answer and there are none.
    """
    return _REGISTRY[objective].make_target(sample, _text_ids(sample, tokenizer, max_tokens), tokenizer)


def make_example(
    objective: str,
    sample: Sample,
    rng: np.random.Generator,
    tokenizer: M6Tokenizer,
    settings: ObjectivesSettings,
    max_tokens: int,
) -> Example:
    """Makes the training sequence of one row: a pure function of its arguments and the state of ``rng``.

    The text is cut to ``max_tokens`` first and corrupted then, so a target text is always what was corrupted.

    Raises:
        BadRow: when the text is empty, or the objective needs a picture, its codes or an answer and there is none.
    """
    kind = _REGISTRY[objective]
    ids = _text_ids(sample, tokenizer, max_tokens)
    if kind.has_pixels and sample.image is None:
        raise BadRow("no image")
    own = settings.of(objective)
    target = kind.make_target(sample, ids, tokenizer)
    return Example(
        source_ids=kind.make_source(ids, rng, tokenizer, own),
        target_ids=target,
        read_ids=kind.hide_target(target, rng, tokenizer, own),
        image=sample.image if kind.has_pixels else None,
        objective_id=OBJECTIVES.index(objective),
    )


def _text_ids(sample: Sample, tokenizer: M6Tokenizer, max_tokens: int) -> list[int]:
    ids = tokenizer.encode_ids(sample.text, max_tokens)
    if not ids:
        raise BadRow("empty text")
    return ids
