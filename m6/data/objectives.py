"""The objectives of M6 (arXiv 2103.00823). Each maps a row to a source and a target sequence.

Pretraining (section 3.3):
    text_denoising        corrupted text            -> the text
    language_modelling    nothing                   -> the text
    image_captioning      image                     -> the text
    image_text_denoising  image + corrupted text    -> the text

The paper does not give the mixing ratio, the mask ratio or the span lengths, so these are settings. Corruption follows
BART (arXiv 1910.13461): one ``<mask>`` replaces each masked span, and sentences are shuffled.

Fine-tuning. These have weight 0 by default and can be mixed with pretraining:

    text_to_image         text                      -> <boi>, the codes of its image, <eoi>
    text_classification   text (and its context)    -> its label
    image_text_matching   image + a text            -> whether the text describes the image
    image_code_denoising  text                      -> the hidden codes of its image
    visual_question_answering
                          image + a question        -> the answer
    text_continuation     first half of a text      -> the rest

The denoising of codes follows M6-UFC (arXiv 2105.14211) with MaskGIT's schedule (arXiv 2202.04200). Attention between
codes is bidirectional, and all hidden codes are predicted at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from m6.data.settings import (
    ClassificationSettings,
    DrawingSettings,
    MaskingSettings,
    ObjectivesSettings,
    TextDenoisingSettings,
    TextToImageSettings,
)

if TYPE_CHECKING:
    from m6.tokenizers.text import M6Tokenizer


def mask_spans(
    ids: list[int], rng: np.random.Generator, *, mask_ratio: float, mean_span_length: float, mask_id: int
) -> list[int]:
    """Replaces random spans by one ``mask_id`` each: BART's text infilling (arXiv 1910.13461).

    Exactly ``round(mask_ratio * len(ids))`` ids are removed, at least one. At least one id remains between two masks.

    Args:
        ids: token ids.
        rng: source of randomness.
        mask_ratio: share of removed ids.
        mean_span_length: span lengths are 1 + Poisson(mean_span_length - 1).
        mask_id: id of ``<mask>``.
    """
    budget = max(1, round(mask_ratio * len(ids)))
    num_kept = len(ids) - budget
    ends = np.minimum(np.cumsum(1 + rng.poisson(mean_span_length - 1, size=budget)), budget)
    # The number of spans fills the budget, but is at most the number of gaps between kept ids. The last span is
    # lengthened or cut to make the lengths sum to the budget.
    num_spans = min(int(np.searchsorted(ends, budget)) + 1, num_kept + 1)
    lengths = np.diff(ends[:num_spans], prepend=0)
    lengths[-1] += budget - lengths.sum()
    # Distinct gaps between kept ids: two spans in one gap would put two masks next to each other.
    gaps = np.sort(rng.choice(num_kept + 1, size=num_spans, replace=False))
    masked, position = [], 0
    for num_between, length in zip(np.diff(gaps, prepend=0).tolist(), lengths.tolist(), strict=True):
        masked += [*ids[position : position + num_between], mask_id]
        position += num_between + length
    return masked + ids[position:]


def shuffle_sentences(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer) -> list[int]:
    """Returns the ids with their sentences in random order."""
    sentences = tokenizer.split_sentence_ids(ids)
    return [token for index in rng.permutation(len(sentences)).tolist() for token in sentences[index]]


def mask_randomly(ids: list[int], rng: np.random.Generator, *, share: float, mask_id: int) -> list[int]:
    """Replaces each id by ``mask_id`` with probability ``share``; the length stays the same."""
    return np.where(rng.random(len(ids)) < share, mask_id, ids).tolist()


def hide_randomly(ids: list[int], rng: np.random.Generator, *, share: float, mask_id: int) -> list[int]:
    """Replaces ``round(share * len(ids))`` random ids by ``mask_id``, at least one; the length stays the same."""
    hidden = rng.choice(len(ids), size=max(1, round(share * len(ids))), replace=False)
    masked = np.array(ids)
    masked[hidden] = mask_id
    return masked.tolist()


# A configuration with fewer tokens for text is an error: a mask and a few tokens teach nothing.
MIN_TEXT_TOKENS = 8
# Tokens reserved for an answer; a row with a longer answer is a bad row.
MAX_ANSWER_TOKENS = 16
MATCH, NO_MATCH = "是", "不是"  # the answers of image_text_matching


class BadRow(ValueError):
    """A row unusable for an objective; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row of a data set."""

    id: str
    text: str
    image: bytes | None = None
    question: str | None = None
    answer: str | None = None
    context: str | None = None
    codes: Sequence[int] | None = None
    """image codes of the row, in ``[0, image_vocab_size)``"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One training sequence ``[<image> x P]? + source_ids + <bos> + target_ids + <eos>``.

    Attributes:
        source_ids: token ids of the source.
        target_ids: token ids of the target.
        corrupted_target_ids: model inputs at the positions of target_ids; None if they equal target_ids.
        in_place: attention in the target is bidirectional, and only corrupted ids are predicted, each at its own
            position. Otherwise each id is predicted from the ids before it.
        image: image file; its patches come first. None: no image.
        objective_id: index in OBJECTIVES.
        data_source_id: index of the row's source in the run's sources.
    """

    source_ids: list[int]
    target_ids: list[int]
    corrupted_target_ids: list[int] | None = None
    in_place: bool = False
    image: bytes | None = None
    objective_id: int = 0
    data_source_id: int = 0


def _text(sample: Sample, ids: list[int], tokenizer: M6Tokenizer) -> list[int]:
    return ids


def _codes(sample: Sample, ids: list[int], tokenizer: M6Tokenizer) -> list[int]:
    if sample.codes is None:
        raise BadRow("no image codes")
    codes = map(tokenizer.image_code_to_id, sample.codes)
    return [tokenizer.boi_token_id, *codes, tokenizer.eoi_token_id]


def _second_half(sample: Sample, ids: list[int], tokenizer: M6Tokenizer) -> list[int]:
    return ids[_middle(ids, tokenizer) :]


def _answer(sample: Sample, ids: list[int], tokenizer: M6Tokenizer) -> list[int]:
    answer = tokenizer.encode_ids(sample.answer or "", MAX_ANSWER_TOKENS + 1)
    if not answer:
        raise BadRow("no answer")
    if len(answer) > MAX_ANSWER_TOKENS:
        raise BadRow(f"the answer has more than {MAX_ANSWER_TOKENS} tokens")
    return answer


def _keep_target(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> None:
    return None


def _mask_codes(
    ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: TextToImageSettings
) -> list[int] | None:
    if settings.code_dropout == 0:
        return None
    boi, *codes, eoi = ids
    return [
        boi,
        *mask_randomly(codes, rng, share=rng.uniform(0, settings.code_dropout), mask_id=tokenizer.code_mask_token_id),
        eoi,
    ]


def _hide_codes(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> list[int]:
    boi, *codes, eoi = ids
    # The share of hidden codes follows the schedule of masked decoding, which begins with all codes hidden.
    share = math.cos(math.pi / 2 * rng.random())
    return [boi, *hide_randomly(codes, rng, share=share, mask_id=tokenizer.code_mask_token_id), eoi]


@dataclass(frozen=True)
class _Objective:
    kind: str
    """The kind of its sources in the manifest."""
    make_source: Callable[[list[int], np.random.Generator, M6Tokenizer, Any], list[int]]
    """(text ids, random numbers, tokenizer, settings) -> source ids"""
    make_target: Callable[[Sample, list[int], M6Tokenizer], list[int]] = _text
    """(row, its text ids, tokenizer) -> target ids"""
    corrupt_target: Callable[[list[int], np.random.Generator, M6Tokenizer, Any], list[int] | None] = _keep_target
    """(target ids, random numbers, tokenizer, settings) -> model inputs at their positions; None: the target ids"""
    has_pixels: bool = False
    """Whether an example begins with the patches of the image."""
    num_texts: int = 1
    """Most copies of the text in an example."""
    is_paired: bool = False
    """Whether ``pair`` must be applied to its rows first."""
    in_place: bool = False
    """See ``Example``."""
    asks: bool = False
    """Whether the row's question takes the place of its text."""

    @property
    def has_codes(self) -> bool:
        """Whether the target consists of image codes."""
        return self.make_target is _codes

    @property
    def has_answer(self) -> bool:
        """Whether the target is the row's answer."""
        return self.make_target is _answer


def _no_source(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> list[int]:
    return []


def _whole_text(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> list[int]:
    return ids


def _first_half(ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: Any) -> list[int]:
    return ids[: _middle(ids, tokenizer)]


def _middle(ids: list[int], tokenizer: M6Tokenizer) -> int:
    """Returns the beginning of a sentence nearest to the middle of a text; BadRow if there is only one sentence."""
    begins = list(itertools.accumulate(map(len, tokenizer.split_sentence_ids(ids))))[:-1]
    if not begins:
        raise BadRow("one sentence, which has no rest")
    return min(begins, key=lambda begin: abs(2 * begin - len(ids)))


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


def _text_or_dropped(
    ids: list[int], rng: np.random.Generator, tokenizer: M6Tokenizer, settings: DrawingSettings
) -> list[int]:
    return [] if rng.random() < settings.caption_dropout else ids


# MicroBatch.objective_ids are indices of this order.
_REGISTRY: dict[str, _Objective] = {
    "text_denoising": _Objective("text", _masked_and_shuffled, num_texts=2),
    "language_modelling": _Objective("text", _no_source),
    "image_captioning": _Objective("image_text", _no_source, has_pixels=True),
    "image_text_denoising": _Objective("image_text", _masked, has_pixels=True, num_texts=2),
    "text_to_image": _Objective("image_text", _text_or_dropped, _codes, _mask_codes),
    "text_classification": _Objective("labelled_text", _whole_text, _answer),
    "image_text_matching": _Objective("image_text", _whole_text, _answer, has_pixels=True, is_paired=True),
    "image_code_denoising": _Objective("image_text", _text_or_dropped, _codes, _hide_codes, in_place=True),
    "visual_question_answering": _Objective("vqa", _whole_text, _answer, has_pixels=True, asks=True),
    "text_continuation": _Objective("text", _first_half, _second_half),
}
OBJECTIVES: tuple[str, ...] = tuple(_REGISTRY)


def source_kind(objective: str) -> str:
    """Returns the kind of an objective's sources: "text", "image_text", "labelled_text" or "vqa"."""
    return _REGISTRY[objective].kind


def reads_codes(objective: str) -> bool:
    """Returns whether an objective needs the image codes of its rows."""
    return _REGISTRY[objective].has_codes


def reads_pixels(objective: str) -> bool:
    """Returns whether an objective reads the images of its rows."""
    return _REGISTRY[objective].has_pixels


def is_in_place(objective: str) -> bool:
    """Returns whether attention is bidirectional in an objective's targets, see ``Example``."""
    return _REGISTRY[objective].in_place


def is_paired(objective: str) -> bool:
    """Returns whether ``pair`` must be applied to an objective's rows."""
    return _REGISTRY[objective].is_paired


def pair(sample: Sample, other_text: str, rng: np.random.Generator) -> Sample:
    """Replaces a row's text by another row's with probability 1/2, and sets the answer: match or no match."""
    text = sample.text if rng.random() < 0.5 else other_text
    return replace(sample, text=text, answer=MATCH if text == sample.text else NO_MATCH)


def max_text_tokens(objective: str, sequence_length: int, num_patches: int, num_codes: int = 0) -> int:
    """Returns the most text tokens of an example of at most ``sequence_length`` tokens.

    Args:
        objective: name of the objective.
        sequence_length: tokens of a row.
        num_patches: patches of an input image.
        num_codes: codes of an output image.
    """
    # Uncorrupted lengths are upper bounds: masking replaces spans by single tokens.
    space = sequence_length - 2  # <bos> and <eos>
    if _REGISTRY[objective].has_pixels:
        space -= num_patches
    if _REGISTRY[objective].has_codes:
        space -= num_codes + 2  # <boi> and <eoi>
    if _REGISTRY[objective].has_answer:
        space -= MAX_ANSWER_TOKENS
    return space // _REGISTRY[objective].num_texts


def target_ids(objective: str, sample: Sample, tokenizer: M6Tokenizer, max_tokens: int) -> list[int]:
    """Returns the target ids of a row, without ``<bos>`` and ``<eos>``.

    Raises:
        BadRow: the text is empty, or the row lacks image codes or an answer needed by the objective.
    """
    definition = _REGISTRY[objective]
    return definition.make_target(sample, _text_ids(objective, sample, tokenizer, max_tokens), tokenizer)


def make_example(
    objective: str,
    sample: Sample,
    rng: np.random.Generator,
    tokenizer: M6Tokenizer,
    settings: ObjectivesSettings,
    max_tokens: int,
) -> Example:
    """Makes the training sequence of one row. The result depends only on the arguments and the state of ``rng``.

    The text is cut to ``max_tokens`` before its corruption, so source and target come from the same tokens.

    Raises:
        BadRow: the text is empty, or the row lacks an image, codes or an answer needed by the objective.
    """
    definition, objective_settings = _REGISTRY[objective], settings.of(objective)
    ids = _text_ids(objective, sample, tokenizer, max_tokens)
    if isinstance(objective_settings, ClassificationSettings) and objective_settings.with_context:
        ids += context_ids(sample.context, max_tokens - len(ids), tokenizer)
    if definition.has_pixels and sample.image is None:
        raise BadRow("no image")
    target = definition.make_target(sample, ids, tokenizer)
    return Example(
        source_ids=definition.make_source(ids, rng, tokenizer, objective_settings),
        target_ids=target,
        corrupted_target_ids=definition.corrupt_target(target, rng, tokenizer, objective_settings),
        in_place=definition.in_place,
        image=sample.image if definition.has_pixels else None,
        objective_id=OBJECTIVES.index(objective),
    )


def context_ids(context: str | None, room: int, tokenizer: M6Tokenizer) -> list[int]:
    """Returns the tokens after a text: ``<sep>`` and its context, cut to ``room`` tokens; empty without a context."""
    ids = tokenizer.encode_ids(context or "", max(room - 1, 0))
    return [tokenizer.sep_token_id, *ids] if ids else []


def text_to_read(objective: str, sample: Sample) -> str:
    """Returns the text read by an objective: the row's question or its text."""
    return (sample.question or "") if _REGISTRY[objective].asks else sample.text


def _text_ids(objective: str, sample: Sample, tokenizer: M6Tokenizer, max_tokens: int) -> list[int]:
    ids = tokenizer.encode_ids(text_to_read(objective, sample), max_tokens)
    if not ids:
        raise BadRow("no question" if _REGISTRY[objective].asks else "empty text")
    return ids
