"""Generation of image codes from text: one interface to both ways of drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m6.errors import UserError
from m6.generation.left_to_right import draw_left_to_right
from m6.generation.masked import draw_masked, num_masked_numbers
from m6.generation.sampling import CodeGrid, Sampling, uniform_numbers

if TYPE_CHECKING:
    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor


@dataclass(frozen=True)
class Draft:
    """A picture to draw. It depends only on these, not on the pictures that are drawn beside it.

    Attributes:
        caption: its text.
        seed: any integer.
        index: its number among the pictures of the caption.
    """

    caption: str
    seed: int = 0
    index: int = 0


def resolve_sampling(model: M6ForConditionalGeneration, sampling: Sampling) -> Sampling:
    """Fills in ``sampling.decoding`` by what the model was trained for, and its temperature.

    Raises:
        UserError: the model was not trained for the decoding that is asked for, or draws only left to right, and passes
            are asked for.
    """
    trained = model.decodings
    if not trained:
        raise UserError("the model has not been trained to draw, with m6.objectives.image_code_denoising for example")
    if sampling.temperature is None:
        sampling = replace(sampling, temperature=model.code_temperature)
    if sampling.decoding is None:
        return replace(sampling, decoding=trained[0])
    if sampling.decoding not in trained:
        objective = {"masked": "image_code_denoising", "left_to_right": "text_to_image"}[sampling.decoding]
        raise UserError(
            f'decoding "{sampling.decoding}": the model has not been trained with m6.objectives.{objective}; it draws '
            f'with "{trained[0]}"'
        )
    return sampling


def num_steps(grid: CodeGrid, sampling: Sampling) -> int:
    """Returns the passes of the model for a batch, with the decoding of ``resolve_sampling``."""
    return sampling.num_passes if sampling.decoding == "masked" else grid.num_codes


def draw_codes(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    drafts: Sequence[Draft],
    *,
    grid: CodeGrid,
    sampling: Sampling,
    known: Tensor | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Generates the image codes of B pictures.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        drafts: B pictures to draw.
        grid: the image tokenizer, whose N codes are drawn.
        sampling: how codes are drawn, as ``resolve_sampling`` returns it.
        known: codes that stay as they are, see ``draw_masked``; only with "masked".
        on_step: called after each pass of the model.

    Returns:
        int64 [B, N] on the CPU, in ``[0, grid.codebook_size)``.

    Raises:
        UserError: a caption is empty, or caption and codes exceed the model's positions.
    """
    captions = [draft.caption for draft in drafts]
    masked = sampling.decoding == "masked"
    number = num_masked_numbers(grid, sampling) if masked else grid.num_codes
    uniform = torch.stack([uniform_numbers(draft.seed, draft.caption, draft.index, number) for draft in drafts])
    if masked:
        return draw_masked(
            model, processor, captions, uniform, grid=grid, sampling=sampling, known=known, on_step=on_step
        )
    return draw_left_to_right(model, processor, captions, uniform, grid=grid, sampling=sampling, on_step=on_step)
