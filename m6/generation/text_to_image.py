"""Generation of image codes from text, one code at a time, and scores to select among the pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import StaticCache
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from m6.config.checks import check_captions
from m6.data.objectives import Example
from m6.errors import UserError
from m6.generation.likelihood import target_log_likelihoods
from m6.model.inputs import derive_position_ids
from m6.tokenizers.special_tokens import TARGET

if TYPE_CHECKING:
    from PIL.Image import Image

    from m6.model.modeling import M6ForConditionalGeneration
    from m6.tokenizers import M6Processor


@dataclass(frozen=True)
class Sampling:
    """How a code is drawn from the model's logits.

    Attributes:
        guidance_scale: g in ``unconditional + g * (conditional - unconditional)``, classifier-free guidance (arXiv
            2207.12598). 1 is no guidance, and no unconditional logits are computed.
        temperature: divides the logits; 0 takes the most likely code.
        top_k: draw from the k most likely codes; None: from all.
        top_p: draw from the fewest codes whose probabilities sum to p; None: from all.

    Raises:
        UserError: a value is out of range.
    """

    guidance_scale: float = 3.0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.guidance_scale < 0 or self.temperature < 0:
            raise UserError(
                f"guidance_scale {self.guidance_scale} and temperature {self.temperature} must be at least 0"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, found {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], found {self.top_p}")

    def probabilities(self, scores: Tensor) -> Tensor:
        """Maps logits [B, K] to the distribution from which codes are drawn, fp64 [B, K]."""
        # fp64, so that rounding of the cumulative sums in _draw hardly ever changes a code.
        scores = scores.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).double()
        ids = torch.empty(0, device=scores.device)  # an argument that these warpers require but do not use
        scores = TemperatureLogitsWarper(self.temperature)(ids, scores) if self.temperature != 1 else scores
        scores = TopKLogitsWarper(self.top_k)(ids, scores) if self.top_k is not None else scores
        scores = TopPLogitsWarper(self.top_p)(ids, scores) if self.top_p is not None else scores
        return scores.softmax(dim=-1)


def uniform_numbers(seed: int, caption: str, index: int, number: int) -> Tensor:
    """Returns the random numbers of one picture, fp64 [number] in [0, 1).

    They depend only on the arguments, not on the device or on other pictures, so the picture is reproducible.

    Args:
        seed: any integer.
        caption: caption of the picture.
        index: index of the picture among those of the caption.
        number: number of codes.
    """
    digest = hashlib.blake2b(f"{seed}/{index}/{caption}".encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    # Drawn in fp32: then the product with the fp64 sum of all probabilities is always less than that sum.
    return torch.from_numpy(generator.random(number, dtype=np.float32)).double()


@torch.no_grad()
def draw_codes(
    model: M6ForConditionalGeneration,
    processor: M6Processor,
    captions: Sequence[str],
    uniform: Tensor,
    *,
    codebook_size: int,
    sampling: Sampling,
    use_cache: bool = True,
    on_code: Callable[[], object] = lambda: None,
) -> Tensor:
    """Generates the image codes of B captions. Each position is restricted to image codes.

    Args:
        model: in evaluation mode.
        processor: processor of the model.
        captions: B texts.
        uniform: [B, N] random numbers in [0, 1), one per code.
        codebook_size: number of codes of the image tokenizer; the model's vocabulary may have more.
        sampling: how codes are drawn.
        use_cache: keeps keys and values in a static cache. Without it, each step computes the whole sequence again.
        on_code: called after each of the N steps.

    Returns:
        int64 [B, N] on the CPU, in ``[0, codebook_size)``.

    Raises:
        UserError: a caption is empty, or caption and codes exceed the model's positions.
    """
    tokenizer, num_codes = processor.tokenizer, uniform.shape[1]
    guided = sampling.guidance_scale != 1
    # Conditional and unconditional sequences run as one batch; the unconditional ones have an empty source.
    sources = [*captions, *([""] * len(captions) if guided else [])]
    check_captions(model.config, tokenizer, captions, num_codes)
    inputs = processor(text=sources, target_prefix=[tokenizer.boi_token_id]).to(model.device)
    input_ids, types, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    positions = derive_position_ids(types, mask)
    first = tokenizer.image_code_to_id(0)
    uniform = uniform.to(model.device)
    # A static cache has a fixed shape, so it is allocated once.
    # - 1: the last code is never an input.
    cache = StaticCache(model.config, max_cache_len=input_ids.shape[1] + num_codes - 1) if use_cache else None
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
        scores = output.logits[:, -1, first : first + codebook_size].float()
        if guided:
            conditional, unconditional = scores.chunk(2)
            scores = unconditional + sampling.guidance_scale * (conditional - unconditional)
        codes[:, step] = _draw(sampling.probabilities(scores), uniform[:, step])
        next_ids = (codes[:, step : step + 1] + first).repeat(2 if guided else 1, 1)
        next_types, next_positions = torch.full_like(next_ids, TARGET), positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(next_ids)], dim=1)
        if use_cache:
            input_ids, types, positions = next_ids, next_types, next_positions
        else:
            input_ids = torch.cat([input_ids, next_ids], dim=1)
            types = torch.cat([types, next_types], dim=1)
            positions = torch.cat([positions, next_positions], dim=1)
        on_code()
    return codes.cpu()


def caption_scores(
    model: M6ForConditionalGeneration, processor: M6Processor, images: Sequence[Image], captions: Sequence[str]
) -> Tensor:
    """Returns the likelihood of each caption given its picture, by which candidates are selected.

    Args:
        model: in evaluation mode, trained on image captioning.
        processor: processor of the model.
        images: B pictures.
        captions: B texts.

    Returns:
        fp64 [B], mean log-likelihood of the caption's tokens and ``<eos>``, in nats.
    """
    side = model.config.image_size
    examples = [Example(source_ids=[], target_ids=processor.tokenizer.encode_ids(caption)) for caption in captions]
    # The image tokenizer and the model may have pictures of different sizes.
    pictures = [np.asarray(image.resize((side, side), processor.image_processor.resample)) for image in images]
    lengths = torch.tensor([len(example.target_ids) + 1 for example in examples])
    return target_log_likelihoods(model, processor, examples, pictures) / lengths


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draws codes int64 [B] by inverse transform sampling from probabilities [B, K] with random numbers [B].

    A code of probability 0 is never drawn, because the cumulative sum does not grow there.
    """
    sums = probabilities.cumsum(dim=-1)
    return torch.searchsorted(sums, (uniform * sums[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
