"""Generation of image codes from text, one code at a time from left to right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import StaticCache

from m6.architecture.special_tokens import TARGET
from m6.config.checks import check_captions
from m6.generation.sampling import CodeGrid, Sampling, draw_by_numbers
from m6.model.inputs import derive_position_ids

if TYPE_CHECKING:
    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor


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
    """Generates the image codes of B captions. Each position is restricted to image codes.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        captions: B texts.
        uniform: [B, N] random numbers in [0, 1), one per code.
        grid: the image tokenizer, whose codes are drawn.
        sampling: how codes are drawn.
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
    # A static cache has a fixed shape, so it is allocated once.
    # - 1: the last code is never an input.
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
        # Places of several codes have one of each codebook, in their order.
        begin = first + step % grid.codes_per_place * book_size
        scores = sampling.guide(output.logits[:, -1, begin : begin + book_size].float())
        codes[:, step] = begin - first + draw_by_numbers(sampling.probabilities(scores), uniform[:, step])
        input_ids = (codes[:, step : step + 1] + first).repeat(len(input_ids) // len(codes), 1)
        types, positions = torch.full_like(input_ids, TARGET), positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(input_ids)], dim=1)
        on_step()
    return codes.cpu()
