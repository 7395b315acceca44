"""From text to image codes: drawing one code after the other, and choosing among the pictures."""

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
    """How a code is drawn from the model's scores.

    Attributes:
        guidance_scale: g in ``scores = unconditional + g * (conditional - unconditional)``, classifier-free guidance
            (arXiv 2207.12598); 1 is none and computes no unconditional scores.
        temperature: divides the scores; 0 takes the best code.
        top_k: keep so many codes, or all.
        top_p: keep the fewest codes whose probabilities sum to this, or all.
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
        """Maps scores [B, K] to the distribution that codes are drawn from, fp64 [B, K]."""
        scores = scores.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(scores.argmax(dim=-1), scores.shape[-1]).double()
        ids = torch.empty(0, device=scores.device)  # what the warpers of transformers take and do not look at
        scores = TemperatureLogitsWarper(self.temperature)(ids, scores) if self.temperature != 1 else scores
        scores = TopKLogitsWarper(self.top_k)(ids, scores) if self.top_k is not None else scores
        scores = TopPLogitsWarper(self.top_p)(ids, scores) if self.top_p is not None else scores
        return scores.softmax(dim=-1)


def uniform_numbers(seed: int, caption: str, index: int, number: int) -> Tensor:
    """The random numbers of one picture, fp64 [number] in [0, 1).

    They depend on the arguments alone, and so does the picture: neither on the device nor on what else is drawn.
    """
    digest = hashlib.blake2b(f"{seed}/{index}/{caption}".encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    # Of fp32's resolution: in fp64 the product with a sum of probabilities could then not reach that sum.
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
    """Writes the image codes of B captions, each position restricted to the codes.

    Args:
        model: in evaluation mode.
        processor: of the model's tokenizer.
        captions: B texts.
        uniform: [B, N] random numbers in [0, 1), one for each code.
        codebook_size: codes of the image tokenizer; the model may have room for more.
        use_cache: keep keys and values in a static cache; without it everything is computed again for each code.
        on_code: called after each of the N steps.

    Returns:
        int64 [B, N] on the CPU, in ``[0, codebook_size)``.

    Raises:
        UserError: a caption is empty, or with its picture longer than the model's positions.
    """
    tokenizer, num_codes = processor.tokenizer, uniform.shape[1]
    guided = sampling.guidance_scale != 1
    sources = [*captions, *([""] * len(captions) if guided else [])]
    check_captions(model.config, tokenizer, captions, num_codes)
    inputs = processor(text=sources, target_prefix=[tokenizer.boi_token_id]).to(model.device)
    input_ids, types, mask = inputs["input_ids"], inputs["token_type_ids"], inputs["attention_mask"]
    positions = derive_position_ids(types, mask)
    first = tokenizer.image_code_to_id(0)
    uniform = uniform.to(model.device)
    # The last code is never an input.
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
        following = (codes[:, step : step + 1] + first).repeat(2 if guided else 1, 1)
        types_following, positions_following = torch.full_like(following, TARGET), positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(following)], dim=1)
        if use_cache:
            input_ids, types, positions = following, types_following, positions_following
        else:
            input_ids = torch.cat([input_ids, following], dim=1)
            types = torch.cat([types, types_following], dim=1)
            positions = torch.cat([positions, positions_following], dim=1)
        on_code()
    return codes.cpu()


def caption_scores(
    model: M6ForConditionalGeneration, processor: M6Processor, images: Sequence[Image], captions: Sequence[str]
) -> Tensor:
    """How likely the model finds each caption when it sees the picture: candidates are chosen by it.

    Args:
        model: in evaluation mode, and trained to caption.
        images: B pictures.
        captions: B texts.

    Returns:
        fp64 [B], mean log-likelihood of the caption's tokens and ``<eos>``, in nats.
    """
    side = model.config.image_size
    examples = [Example(source_ids=[], target_ids=processor.tokenizer.encode_ids(caption)) for caption in captions]
    pictures = [np.asarray(image.resize((side, side), processor.image_processor.resample)) for image in images]
    lengths = torch.tensor([len(example.target_ids) + 1 for example in examples])
    return target_log_likelihoods(model, processor, examples, pictures) / lengths


def _draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The code at which the summed probabilities [B, K] pass the random number [B]: int64 [B].

    A code of probability 0 is never drawn: the sum does not pass anything there.
    """
    sums = probabilities.cumsum(dim=-1)
    return torch.searchsorted(sums, (uniform * sums[:, -1]).unsqueeze(-1), right=True).squeeze(-1)
