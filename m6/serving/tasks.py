"""The tasks of the service: captioning images, answering questions about them, and generating images."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from m6.config.checks import check_captions
from m6.errors import UserError
from m6.generation.captioning import caption
from m6.generation.drawing import Draft, draw_codes, resolve_sampling
from m6.generation.pipeline import M6TextToImagePipeline, paint
from m6.generation.sampling import Sampling

if TYPE_CHECKING:
    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor


@dataclass(frozen=True)
class CaptionJob:
    """An image to caption, or to answer a question about, in at most ``max_new_tokens`` tokens with ``<eos>``."""

    picture: Image.Image
    max_new_tokens: int
    question: str = ""


class Captioning:
    """Captions images, and answers questions about them, by greedy decoding.

    A job's length is its number of decoding steps. The measured costs leave out the longer prompts of questions.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        max_new_tokens: limit of a job's max_new_tokens.

    Raises:
        UserError: the model has fewer positions than max_new_tokens.
    """

    def __init__(self, model: M6ForConditionalGeneration, processor: M6Processor, max_new_tokens: int) -> None:
        if max_new_tokens > model.config.max_position_embeddings:
            raise UserError(
                f"max_new_tokens {max_new_tokens} is more than the model's max_position_embeddings "
                f"{model.config.max_position_embeddings}"
            )
        self.model, self.processor, self.max_new_tokens = model, processor, max_new_tokens

    @property
    def answers(self) -> bool:
        """Whether the model answers questions. One that does not say what it has learned may."""
        return not self.model.learned_objectives or "visual_question_answering" in self.model.learned_objectives

    @property
    def max_length(self) -> int:
        """Largest length of a job, in decoding steps."""
        return self.max_new_tokens

    def job(self, picture: Image.Image, max_new_tokens: int, question: str) -> CaptionJob:
        """Returns the job of a request; UserError if the question is too long."""
        length, limit = len(self.processor.tokenizer.encode_ids(question)), self.model.config.max_position_embeddings
        if length > limit:
            raise UserError(f"the question {question[:20]!r}... has {length} tokens, the model reads {limit}")
        return CaptionJob(picture, max_new_tokens, question)

    def identity(self) -> dict[str, Any]:
        """Returns all parameters of a batch's cost: the model."""
        return {"task": "caption", "model": self.model.config.to_dict(), "type": str(self.model.dtype)}

    def length(self, job: CaptionJob) -> int:
        """Returns the most decoding steps of a job."""
        return job.max_new_tokens

    def run(self, jobs: Sequence[CaptionJob]) -> list[str]:
        """Returns the caption or the answer of each job."""
        return self._caption(jobs)

    def run_synthetic(self, length: int, batch_size: int) -> None:
        """Runs a batch of jobs with ``length`` steps each, to measure its time."""
        side = self.model.config.image_size
        # min_new_tokens = length: otherwise a caption could end early.
        self._caption([CaptionJob(Image.new("RGB", (side, side), "white"), length)] * batch_size, length)

    def _caption(self, jobs: Sequence[CaptionJob], min_new_tokens: int = 0) -> list[str]:
        limits = [job.max_new_tokens for job in jobs]
        stop = StoppingCriteriaList([RowLimits(self.model.config.bos_token_id, limits)])
        return caption(
            self.model,
            self.processor,
            [job.picture for job in jobs],
            [job.question for job in jobs],
            num_beams=1,
            max_new_tokens=max(limits),
            batch_size=len(jobs),
            min_new_tokens=min_new_tokens,
            do_sample=False,
            stopping_criteria=stop,
        )


class RowLimits(StoppingCriteria):
    """Stops each row of a batch after its own number of tokens after ``<bos>``."""

    def __init__(self, bos_token_id: int, limits: Sequence[int]) -> None:
        self.bos_token_id, self.limits = bos_token_id, torch.tensor(limits)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """Returns bool [B]: whether each row has reached its limit."""
        # Prompts are padded on the left, so <bos> is not at the same column in every row.
        begins = (input_ids == self.bos_token_id).int().argmax(dim=1)
        return input_ids.shape[1] - 1 - begins >= self.limits.to(input_ids.device)


@dataclass(frozen=True)
class DrawJob:
    """An image to generate: image ``index`` of a text and a seed, in fp32 the same as by ``m6 generate``."""

    text: str
    seed: int
    index: int
    num_tokens: int
    """tokens of the text"""
    warnings: tuple[str, ...] = ()
    """descriptions of parts of the text unknown to the model"""


class Drawing:
    """Generates images of texts as PNG.

    All images have the same number of codes, so a job's length is the length of its text.

    Args:
        pipeline: model, processor and image tokenizer.
        sampling: how codes are drawn.

    Raises:
        UserError: the model was not trained for the decoding in ``sampling``.
    """

    def __init__(self, pipeline: M6TextToImagePipeline, sampling: Sampling) -> None:
        self.pipeline, self.sampling = pipeline, resolve_sampling(pipeline.model, sampling)

    @property
    def max_length(self) -> int:
        """Upper bound of a job's length in tokens."""
        return self.pipeline.model.config.max_position_embeddings

    def identity(self) -> dict[str, Any]:
        """Returns all parameters of a batch's cost: the models and the sampling of codes."""
        model, image_tokenizer = self.pipeline.model, self.pipeline.image_tokenizer
        return {
            "task": "generate",
            "model": model.config.to_dict(),
            "type": str(model.dtype),
            "image_tokenizer": image_tokenizer.config_document(),
            "sampling": asdict(self.sampling),
        }

    def job(self, text: str, seed: int, index: int) -> DrawJob:
        """Returns the job of a text; UserError if the text is empty or too long for the model."""
        tokenizer, num_codes = self.pipeline.processor.tokenizer, self.pipeline.image_tokenizer.num_codes
        check_captions(self.pipeline.model.config, tokenizer, [text], num_codes)
        return DrawJob(text, seed, index, len(tokenizer.encode_ids(text)), (*self.pipeline.caption_warnings(text),))

    def length(self, job: DrawJob) -> int:
        """Returns the tokens of a job's text."""
        return job.num_tokens

    def run(self, jobs: Sequence[DrawJob]) -> list[bytes]:
        """Returns the PNG file of each job."""
        image_tokenizer = self.pipeline.image_tokenizer
        codes = draw_codes(
            self.pipeline.model,
            self.pipeline.processor,
            [Draft(job.text, job.seed, job.index) for job in jobs],
            grid=image_tokenizer,
            sampling=self.sampling,
        )
        return [_png(picture) for picture in paint(image_tokenizer, codes)]

    def run_synthetic(self, length: int, batch_size: int) -> None:
        """Runs a batch of texts of ``length`` tokens, to measure its time."""
        # The tokenizer encodes each digit as one token.
        self.run([DrawJob("7" * length, 0, index, length) for index in range(batch_size)])


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()
