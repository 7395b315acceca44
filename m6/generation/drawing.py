"""Generates image codes from text: from left to right, or masked, all codes at once in a few passes.

In masked decoding all codes are hidden at first. Each pass samples every hidden code, keeps the most certain codes, and
hides the others again, until all are kept: MaskGIT (arXiv 2202.04200, section 3.2), used for M6 in M6-UFC (arXiv
2105.14211).

``repaint`` draws a part of an image anew and keeps the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import StaticCache

from m6.architecture.names import SOURCE, TARGET
from m6.config.checks import check_captions
from m6.data.pictures import to_unit_range
from m6.errors import UserError
from m6.generation.sampling import CodeGrid, Sampling, draw_by_numbers, uniform_numbers
from m6.model.embeddings import derive_position_ids
from m6.tokenizers.pictures import square_rgb, upright
from m6.tokenizers.processor import M6ImageProcessor

if TYPE_CHECKING:
    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor
    from m6.tokenizers.image import ImageTokenizer


@torch.no_grad()
def draw_left_to_right(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    captions: Sequence[str],
    uniform: Tensor,
    *,
    grid: CodeGrid,
    sampling: Sampling,
    on_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Generates the image codes of B captions from left to right. Each position is restricted to image codes.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        captions: B texts.
        uniform: [B, N] random numbers in [0, 1), one per code.
        grid: the image tokenizer of the codes.
        sampling: settings for sampling codes.
        on_step: called after each of the N steps.

    Returns:
        int64 [B, N] on the CPU, in ``[0, grid.codebook_size)``.

    Raises:
        UserError: a caption is empty, or caption and codes exceed the model's positions.
    """
    tokenizer, num_codes = processor.tokenizer, uniform.shape[1]
    check_captions(model.config, tokenizer, captions, num_codes)
    inputs = processor(text=sampling.sources(captions), target_prefix=[tokenizer.boi_token_id]).to(model.device)
    input_ids, types, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    positions = derive_position_ids(types, mask)
    first, book_size = tokenizer.image_code_to_id(0), grid.codebook_size // grid.codes_per_place
    uniform = uniform.to(model.device)
    # A static cache has a fixed shape and is allocated once. It has no room for the last code, which is never an input.
    cache = StaticCache(model.config, max_cache_len=input_ids.shape[1] + num_codes - 1)
    codes = torch.empty(uniform.shape, dtype=torch.int64, device=model.device)
    for step in range(num_codes):
        output = model(
            input_ids=input_ids,
            token_type_ids=types,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            logits_to_keep=1,
        )
        # A grid position has one code of each codebook, in their order.
        begin = first + step % grid.codes_per_place * book_size
        scores = sampling.guide(output.logits[:, -1, begin : begin + book_size].float())
        codes[:, step] = begin - first + draw_by_numbers(sampling.probabilities(scores), uniform[:, step])
        input_ids = (codes[:, step : step + 1] + first).repeat(len(input_ids) // len(codes), 1)
        types, positions = torch.full_like(input_ids, TARGET), positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(input_ids)], dim=1)
        on_step()
    return codes.cpu()


HIDDEN = -1
_CHOICE_TEMPERATURE = 4.5  # of the noise on the certainty in the first pass, as in MaskGIT's code


def num_masked_numbers(grid: CodeGrid, sampling: Sampling) -> int:
    """Returns the number of random numbers for an image: two for each code in each pass."""
    return sampling.num_passes * 2 * grid.num_codes


@torch.no_grad()
def draw_masked(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    captions: Sequence[str],
    uniform: Tensor,
    *,
    grid: CodeGrid,
    sampling: Sampling,
    known: Tensor | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> Tensor:
    """Generates the image codes of B captions by masked decoding.

    Args:
        model: in evaluation mode, trained on the objective image_code_denoising.
        processor: processor of the model.
        captions: B texts.
        uniform: [B, ``num_masked_numbers``] random numbers in [0, 1).
        grid: the image tokenizer; an image has N codes.
        sampling: settings for sampling codes, with the number of passes.
        known: int64 [B, N] fixed codes, HIDDEN at codes to generate; None: all are generated.
        on_step: called after each pass.

    Returns:
        int64 [B, N] on the CPU, in ``[0, grid.codebook_size)``.

    Raises:
        UserError: a caption is empty, or caption and codes exceed the model's positions.
    """
    tokenizer, device = processor.tokenizer, model.device
    check_captions(model.config, tokenizer, captions, grid.num_codes)
    row = [tokenizer.boi_token_id, *[tokenizer.code_mask_token_id] * grid.num_codes, tokenizer.eoi_token_id]
    inputs = processor(text=sampling.sources(captions), target_prefix=[*row, tokenizer.eos_token_id]).to(device)
    input_ids, types, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    positions = derive_position_ids(types, mask)
    types = types.masked_fill(types == TARGET, SOURCE)  # bidirectional attention between codes
    # Prompts are padded on the left, so the codes of all rows are in the same columns: before <eoi> and <eos>.
    columns = torch.arange(-2 - grid.num_codes, -2, device=device) + input_ids.shape[1]
    first, book_size = tokenizer.image_code_to_id(0), grid.codebook_size // grid.codes_per_place
    # Only the head's rows of image codes: with the whole vocabulary, the head would take a quarter of the time.
    tokens = model.model.embeddings.tokens.weight
    heads = tokens[first : first + grid.codebook_size].unflatten(0, (-1, book_size))
    books = torch.arange(grid.num_codes, device=device) % grid.codes_per_place
    codes = torch.full((len(captions), grid.num_codes), HIDDEN) if known is None else known
    codes = codes.to(device)
    num_hidden = (codes == HIDDEN).sum(dim=1)
    numbers = uniform.to(device).view(len(captions), sampling.num_passes, 2, grid.num_codes)
    for step in range(sampling.num_passes):
        hidden = codes == HIDDEN
        ids = torch.where(hidden, tokenizer.code_mask_token_id, codes + first)
        input_ids[:, columns] = ids.repeat(len(input_ids) // len(codes), 1)
        output = model.model(input_ids=input_ids, token_type_ids=types, position_ids=positions, attention_mask=mask)
        scores = sampling.guide(_own_codebook(output.last_hidden_state[:, columns], heads)).flatten(0, 1)
        drawn = draw_by_numbers(sampling.probabilities(scores), numbers[:, step, 0].flatten())
        # Certainty ignores top_k and top_p: under them the sampled code may have probability 1 everywhere.
        likelihoods = sampling.tempered(scores).softmax(dim=-1)
        certainty = likelihoods.gather(1, drawn.unsqueeze(1)).log().view(codes.shape)
        noise = -(-numbers[:, step, 1].clamp(min=torch.finfo(torch.float32).tiny).log()).log()  # Gumbel
        done = (step + 1) / sampling.num_passes
        certainty = certainty + _CHOICE_TEMPERATURE * (1 - done) * (sampling.effective_temperature > 0) * noise
        codes = torch.where(hidden, drawn.view(codes.shape) + books * book_size, codes)
        # Kept codes stay. The least certain of the others are hidden again. argsort of argsort gives ranks.
        rank = certainty.masked_fill(~hidden, math.inf).argsort(dim=1, stable=True).argsort(dim=1)
        num_again = (num_hidden * math.cos(math.pi / 2 * done)).long()
        codes = codes.masked_fill(rank < num_again.unsqueeze(1), HIDDEN)
        on_step()
    return codes.cpu()


def _own_codebook(hidden_states: Tensor, heads: Tensor) -> Tensor:
    """Returns the logits of each code in its own codebook: fp32 [B, N, K].

    Args:
        hidden_states: [B, N, D]; the codes of a grid position are neighbours, one of each codebook.
        heads: output matrices of the codebooks, [codebooks, K, D].
    """
    by_place = hidden_states.unflatten(1, (-1, len(heads)))
    return torch.einsum("npbd,bkd->npbk", by_place, heads).flatten(1, 2).float()


@dataclass(frozen=True)
class Draft:
    """An image to draw. The result depends only on these fields, not on other images of the batch.

    Attributes:
        caption: text of the image.
        seed: any integer.
        index: number of the image among the images of the caption.
    """

    caption: str
    seed: int = 0
    index: int = 0


def resolve_sampling(model: M6ForConditionalGeneration, sampling: Sampling) -> Sampling:
    """Fills in a missing decoding and temperature from the model.

    Raises:
        UserError: the model was not trained for the requested decoding, or ``passes`` is given and the model draws only
            from left to right.
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
    """Returns the number of model passes for a batch; ``sampling`` comes from ``resolve_sampling``."""
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
    """Generates the image codes of B images.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        drafts: B images to draw.
        grid: the image tokenizer; an image has N codes.
        sampling: result of ``resolve_sampling``.
        known: fixed codes, see ``draw_masked``; only with "masked".
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


@dataclass(frozen=True)
class Repaint:
    """An image, and the box to draw anew.

    Attributes:
        picture: an image of any size. It is rotated upright, padded with white to a square and resized, as in
            training.
        box: left, top, right and bottom in pixels of the upright image; right and bottom are exclusive.

    Raises:
        UserError: the box is empty or leaves the image.
    """

    picture: Image.Image
    box: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        left, top, right, bottom = self.box
        width, height = self._upright().size
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            raise UserError(
                f"the mask {left},{top},{right},{bottom} (left, top, right, bottom) is empty or leaves the picture of "
                f"{width} x {height} pixels; expected 0 <= left < right <= {width} and 0 <= top < bottom <= {height}"
            )

    def known_codes(self, image_tokenizer: ImageTokenizer) -> Tensor:
        """Encodes the image: int64 [1, N], HIDDEN at every grid position touched by the box."""
        square = square_rgb(self.picture)
        size = (image_tokenizer.image_size, image_tokenizer.image_size)
        pixels = np.array(square.resize(size, M6ImageProcessor.resample))
        device = next(image_tokenizer.parameters()).device
        codes = image_tokenizer.encode(to_unit_range(pixels[None], device)).cpu()
        side = math.isqrt(image_tokenizer.num_codes // image_tokenizer.codes_per_place)
        places = codes.view(side, side, -1)
        left, top, right, bottom = self._box_in_square()
        rows, columns = (
            slice(first * side // square.width, -(-last * side // square.width))
            for first, last in ((top, bottom), (left, right))
        )
        places[rows, columns] = HIDDEN
        return places.view(1, -1)

    def framed(self, drawn: Image.Image) -> Image.Image:
        """Returns the upright image as RGB on white, in its own size, with the box from the drawn image."""
        square, box = square_rgb(self.picture).copy(), self._box_in_square()
        square.paste(drawn.resize(square.size, M6ImageProcessor.resample).crop(box), box)
        width, height = self._upright().size
        left, top = (square.width - width) // 2, (square.height - height) // 2
        return square.crop((left, top, left + width, top + height))

    def _upright(self) -> Image.Image:
        return upright(self.picture)

    def _box_in_square(self) -> tuple[int, int, int, int]:
        width, height = self._upright().size
        side = max(width, height)
        left, top = (side - width) // 2, (side - height) // 2
        return self.box[0] + left, self.box[1] + top, self.box[2] + left, self.box[3] + top
