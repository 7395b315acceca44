"""The pretraining objectives of M6 (arXiv 2103.00823), section 3.3: from a row to a source and a target.

    text_denoising        corrupted text            -> the text
    language_modelling    nothing                   -> the text
    image_captioning      picture                   -> the text
    image_text_denoising  picture + corrupted text  -> the text

The paper does not give the mixing ratio, the mask ratio or the span lengths, so these are settings; corruption
follows BART (arXiv 1910.13461): spans of tokens are replaced by one ``<mask>`` each, sentences are shuffled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from m6.errors import UserError, nearest
from m6.tokenizers.text import M6Tokenizer

# A shorter text leaves nothing to learn from: a mask and a few tokens around it.
MIN_TEXT_TOKENS = 8
# What the target of image_text_matching says.
MATCH, NO_MATCH = "是", "不是"


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ObjectiveSettings(_Settings):
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


class ObjectivesSettings(_Settings):
    """The pretraining objectives and their shares."""

    text_denoising: TextDenoisingSettings = Field(
        default=TextDenoisingSettings(), description="masked and shuffled text -> the text"
    )
    language_modelling: ObjectiveSettings = Field(default=ObjectiveSettings(), description="nothing -> the text")
    image_captioning: ObjectiveSettings = Field(default=ObjectiveSettings(), description="picture -> its text")
    image_text_denoising: MaskingSettings = Field(
        default=MaskingSettings(), description="picture and its masked text -> the text"
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


@dataclass(frozen=True, kw_only=True)
class Example:
    """One training sequence ``[<image> x P]? + source_ids + <bos> + target_ids + <eos>``.

    ``weights`` are the loss weights of the target ids and of ``<eos>`` (so one more than target_ids); None: all 1.
    """

    source_ids: list[int]
    target_ids: list[int]
    image: bytes | None = None
    weights: list[float] | None = None
    objective_id: int = 0


Make = Callable[[list[int], np.random.Generator, M6Tokenizer, Any], list[int]]


@dataclass(frozen=True)
class _Objective:
    kind: str
    """The kind of source it reads, as in the manifest."""
    make_source: Make
    """(text ids, random numbers, tokenizer, settings) -> source ids"""


def mask_spans(
    ids: list[int], rng: np.random.Generator, *, mask_ratio: float, mean_span_length: float, mask_id: int
) -> list[int]:
    """Replaces random spans by one ``mask_id`` each.

    Exactly ``round(mask_ratio * len(ids))`` ids disappear, but at least one; no two masks are neighbours.
    """
    budget = max(1, round(mask_ratio * len(ids)))
    num_kept = len(ids) - budget
    ends = np.minimum(np.cumsum(1 + rng.poisson(mean_span_length - 1, size=budget)), budget)
    # The spans that fill the budget; were there more than places between kept ids, the last takes what is left.
    num_spans = min(int(np.searchsorted(ends, budget)) + 1, num_kept + 1)
    lengths = np.diff(ends[:num_spans], prepend=0)
    lengths[-1] += budget - lengths.sum()
    places = np.sort(rng.choice(num_kept + 1, size=num_spans, replace=False))
    masked, position = [], 0
    for gap, length in zip(np.diff(places, prepend=0).tolist(), lengths.tolist(), strict=True):
        masked += [*ids[position : position + gap], mask_id]
        position += gap + length
    return masked + ids[position:]


def shuffle_sentences(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer) -> list[int]:
    """Puts the sentences in random order."""
    sentences = tokenizer.split_sentence_ids(ids)
    return [token for index in rng.permutation(len(sentences)).tolist() for token in sentences[index]]


def _nothing(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> list[int]:
    return []


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


_REGISTRY: dict[str, _Objective] = {
    "text_denoising": _Objective("text", _masked_and_shuffled),
    "language_modelling": _Objective("text", _nothing),
    "image_captioning": _Objective("image_text", _nothing),
    "image_text_denoising": _Objective("image_text", _masked),
}
OBJECTIVES: tuple[str, ...] = tuple(_REGISTRY)


def source_kind(objective: str) -> str:
    """The kind of source that an objective reads: "text" or "image_text"."""
    return _REGISTRY[objective].kind


def max_text_tokens(objective: str, sequence_length: int, num_patches: int) -> int:
    """Tokens of a text such that its example is no longer than ``sequence_length``."""
    space = sequence_length - 2  # <bos> and <eos>
    if source_kind(objective) == "image_text":
        space -= num_patches
    has_source = _REGISTRY[objective].make_source is not _nothing
    return space // 2 if has_source else space


def make_example(
    objective: str,
    sample: Sample,
    rng: np.random.Generator,
    tokenizer: M6Tokenizer,
    settings: ObjectivesSettings,
    max_tokens: int,
) -> Example:
    """Makes the training sequence of one row: a pure function of its arguments and the state of ``rng``.

    The text is cut to ``max_tokens`` first and corrupted then, so the target is always what was corrupted.

    Raises:
        BadRow: when the text is empty, or the objective needs a picture and there is none.
    """
    ids = tokenizer.encode_ids(sample.text, max_tokens)
    if not ids:
        raise BadRow("empty text")
    image = sample.image if source_kind(objective) == "image_text" else None
    if image is None and source_kind(objective) == "image_text":
        raise BadRow("no image")
    source_ids = _REGISTRY[objective].make_source(ids, rng, tokenizer, settings.of(objective))
    return Example(source_ids=source_ids, target_ids=ids, image=image, objective_id=OBJECTIVES.index(objective))
