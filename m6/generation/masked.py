"""Generation of image codes from text, all codes at once in a few passes.

At first all codes are hidden. Each pass draws every hidden code, keeps those of which the model is most certain and
hides the others again, until all are kept: MaskGIT (arXiv 2202.04200, section 3.2), as M6-UFC (arXiv 2105.14211) draws
with M6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from m6.architecture.special_tokens import SOURCE, TARGET
from m6.config.checks import check_captions
from m6.generation.sampling import CodeGrid, Sampling, draw_by_numbers
from m6.model.inputs import derive_position_ids

if TYPE_CHECKING:
    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor

HIDDEN = -1
_CHOICE_TEMPERATURE = 4.5  # of the noise that is added to the certainty of the first pass, as in MaskGIT's code


def num_masked_numbers(grid: CodeGrid, sampling: Sampling) -> int:
    """Returns how many random numbers a picture takes: in each pass two for each code."""
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
    """Generates the image codes of B captions.

    Args:
        model: in evaluation mode, trained on the objective image_code_denoising.
        processor: processor of the model.
        captions: B texts.
        uniform: [B, ``num_masked_numbers``] random numbers in [0, 1).
        grid: the image tokenizer, whose N codes are drawn.
        sampling: how codes are drawn, and in how many passes.
        known: int64 [B, N] codes that stay as they are, HIDDEN where a code is drawn; None: all are drawn.
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
    types = types.masked_fill(types == TARGET, SOURCE)  # the codes see each other in both directions
    # Prompts are padded on the left, so the codes of all rows are in the same columns, before <eoi> and <eos>.
    columns = torch.arange(-2 - grid.num_codes, -2, device=device) + input_ids.shape[1]
    first, book_size = tokenizer.image_code_to_id(0), grid.codebook_size // grid.codes_per_place
    # The rows of the head that can be drawn from: those of the whole vocabulary would take a quarter of the time.
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
        # Without top_k and top_p, under which a code that is drawn may have the probability 1 everywhere.
        likelihoods = sampling.tempered(scores).softmax(dim=-1)
        certainty = likelihoods.gather(1, drawn.unsqueeze(1)).log().view(codes.shape)
        noise = -(-numbers[:, step, 1].clamp(min=torch.finfo(torch.float32).tiny).log()).log()  # Gumbel
        done = (step + 1) / sampling.num_passes
        certainty = certainty + _CHOICE_TEMPERATURE * (1 - done) * (sampling.effective_temperature > 0) * noise
        codes = torch.where(hidden, drawn.view(codes.shape) + books * book_size, codes)
        # What was kept stays; of the rest, the least certain are hidden again.
        rank = certainty.masked_fill(~hidden, math.inf).argsort(dim=1, stable=True).argsort(dim=1)
        num_again = (num_hidden * math.cos(math.pi / 2 * done)).long()
        codes = codes.masked_fill(rank < num_again.unsqueeze(1), HIDDEN)
        on_step()
    return codes.cpu()


def _own_codebook(hidden_states: Tensor, heads: Tensor) -> Tensor:
    """Returns the logits of each code in its own codebook: fp32 [B, N, K].

    Args:
        hidden_states: [B, N, D]; the codes of a place are neighbours, one of each book.
        heads: [books, K, D].
    """
    by_place = hidden_states.unflatten(1, (-1, len(heads)))
    return torch.einsum("npbd,bkd->npbk", by_place, heads).flatten(1, 2).float()
