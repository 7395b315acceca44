"""What the service does with a batch: describe pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from m6.errors import UserError
from m6.generation.captioning import caption

if TYPE_CHECKING:
    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor


@dataclass(frozen=True)
class CaptionJob:
    """A picture to describe in at most ``max_new_tokens``, ``<eos>`` included."""

    picture: Image.Image
    max_new_tokens: int


class Captioning:
    """Greedy descriptions. All prompts are of one length, so the steps of decoding are what is padded.

    Args:
        model: in evaluation mode.
        processor: of the model.
        max_new_tokens: the most that a job may ask for.

    Raises:
        UserError: the model has fewer positions.
    """

    def __init__(self, model: M6ForConditionalGeneration, processor: M6Processor, max_new_tokens: int) -> None:
        if max_new_tokens > model.config.max_position_embeddings:
            raise UserError(
                f"max_new_tokens {max_new_tokens} is more than the model's max_position_embeddings "
                f"{model.config.max_position_embeddings}"
            )
        self.model, self.processor, self.max_new_tokens = model, processor, max_new_tokens

    def length(self, job: CaptionJob) -> int:
        return job.max_new_tokens

    def run(self, jobs: Sequence[CaptionJob]) -> list[str]:
        return self._describe(jobs)

    def try_out(self, length: int, batch_size: int) -> None:
        """Runs a batch of that size in which every job takes all of ``length`` steps."""
        side = self.model.config.image_size
        self._describe([CaptionJob(Image.new("RGB", (side, side), "white"), length)] * batch_size, length)

    def _describe(self, jobs: Sequence[CaptionJob], min_new_tokens: int = 0) -> list[str]:
        limits = [job.max_new_tokens for job in jobs]
        stop = StoppingCriteriaList([RowLimits(self.model.config.bos_token_id, limits)])
        return caption(
            self.model,
            self.processor,
            [job.picture for job in jobs],
            num_beams=1,
            max_new_tokens=max(limits),
            min_new_tokens=min_new_tokens,
            do_sample=False,
            stopping_criteria=stop,
        )


class RowLimits(StoppingCriteria):
    """Ends each row of a batch after its own number of tokens behind ``<bos>``."""

    def __init__(self, bos_token_id: int, limits: Sequence[int]) -> None:
        self.bos_token_id, self.limits = bos_token_id, torch.tensor(limits)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:  # type: ignore[override]
        begins = (input_ids == self.bos_token_id).int().argmax(dim=1)
        return input_ids.shape[1] - 1 - begins >= self.limits.to(input_ids.device)
