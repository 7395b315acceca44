"""Checks of a run's configuration that need its file, its ranks, its tokenizers or its captions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from m6.architecture.settings import ModelSettings
from m6.config.pipeline import PipelineSettings
from m6.config.run import RunConfig
from m6.config.tensor import TensorSettings
from m6.data.workers import check_number
from m6.errors import UserError
from moe.exchange_steps import exchange_steps

if TYPE_CHECKING:
    from m6.tokenizers.text import M6Tokenizer


def check_has_model(config: RunConfig, path: Path) -> None:
    """Raises UserError if the JSON of a run says nothing of the model's size.

    That of a fine-tuning is such a JSON: its model would be the one of the defaults.
    """
    section = config.document["m6"]
    sizes = {"num_layers", "hidden_size"} & (section.get("model") or {}).keys()
    if not sizes and config.m6.moe is None:
        raise UserError(
            f"{path}: m6.model has no num_layers and no hidden_size; this looks like the JSON of a fine-tuning, which "
            "takes its model from a run: give that by --init to m6 finetune or m6 submit"
        )


def check_world_size(config: RunConfig, world_size: int) -> None:
    """Raises UserError if the batch size, a pipeline or ``ep_size`` does not fit ``world_size`` ranks."""
    if config.pipeline is not None:
        _check_pipeline(config, config.pipeline, world_size)
    if config.tensor is not None:
        _check_tensor(config.tensor, config.pipeline_size, world_size)
    ep_size = config.m6.training.ep_size
    if world_size % ep_size:
        raise UserError(
            f"m6.training.ep_size {ep_size} does not divide the world size {world_size}; use a divisor of it"
        )
    split = config.batch_split(world_size)
    config.batch_sizes.check(split)
    shares = split.shares(config.deepspeed.train_batch_size)
    config.deepspeed.check_accumulation(shares)
    # An update in the backward pass uses a gradient at once, so it cannot add up those of several passes.
    updates_at_once = config.expert_store is not None and config.expert_store.update == "backward"
    if updates_at_once and config.backward_passes(world_size) > 1:
        raise UserError(
            'm6.offload: "update": "backward" needs one micro-batch a step, or m6.training.overlap_micro_batches of '
            f"all of them, but train_batch_size {config.deepspeed.train_batch_size} makes {max(shares)} on "
            f"{world_size} ranks"
        )
    if config.m6.moe is not None:
        try:
            exchange_steps(config.model.moe_config(), ep_size)
        except ValueError as error:
            raise UserError(f"m6.moe and m6.training.ep_size: {error}") from None


def check_processes(config: RunConfig, cores: int) -> None:
    """Raises UserError if the run asks for more processes or threads than a rank has cores for."""
    check_number("m6.data.num_workers", config.m6.data.num_workers, cores)
    if config.m6.offload is not None:
        check_number("m6.offload.num_threads", config.m6.offload.num_threads, cores)


def _check_tensor(tensor: TensorSettings, pipeline_size: int, world_size: int) -> None:
    size = tensor.num_ranks
    if world_size % (pipeline_size * size):
        more = -(-world_size // (pipeline_size * size)) * pipeline_size * size
        ranks = f"the world size {world_size}"
        if pipeline_size > 1:
            ranks = f"the {world_size // pipeline_size} ranks that hold the same stage, world size {world_size}"
        raise UserError(
            f"m6.parallel.tensor.num_ranks {size} does not divide {ranks}; start {more} ranks, or set "
            "m6.parallel.tensor=null"
        )


def _check_pipeline(config: RunConfig, pipeline: PipelineSettings, world_size: int) -> None:
    name, size = "m6.parallel.pipeline", pipeline.num_ranks
    if world_size % size:
        fitting = [divisor for divisor in range(2, world_size + 1) if world_size % divisor == 0]
        nearest_size = min(fitting, key=lambda divisor: abs(divisor - size), default=None)
        advice = f"use {nearest_size}" if nearest_size else "start more ranks, or set m6.parallel.pipeline=null"
        raise UserError(f"{name}.num_ranks {size} does not divide the world size {world_size}; {advice}")
    pipelines, ep_size = world_size // size, config.m6.training.ep_size
    if pipelines % ep_size:
        raise UserError(
            f"m6.training.ep_size {ep_size} does not divide the {pipelines} ranks that hold the same stage, world size "
            f"{world_size} / {name}.num_ranks {size}: experts are split inside of a stage; use ep_size "
            f"{max(divisor for divisor in range(1, ep_size + 1) if pipelines % divisor == 0)}"
        )


def check_tokenizer(config: RunConfig, tokenizer: M6Tokenizer) -> None:
    """Raises UserError if the tokenizer's vocabulary sizes differ from the model's."""
    for name in ("text_vocab_size", "image_vocab_size"):
        expected, actual = getattr(config.model, name), getattr(tokenizer, name)
        if expected != actual:
            if config.m6.init is not None:
                remedy = f"m6.data.tokenizer must be the one that {config.m6.init} was trained with"
                if (kept := config.m6.init / "tokenizer").is_dir():
                    remedy += f", {kept}"
            else:
                option = name.replace("text_", "").replace("_", "-")
                remedy = (
                    f'set m6.model.{name}={actual}, or make a tokenizer with "m6 data tokenizer --{option} {expected}"'
                )
            raise UserError(
                f"m6.model.{name} is {expected}, but the tokenizer {config.m6.data.tokenizer} has {actual}; {remedy}"
            )


def check_codes_fit(model: ModelSettings, codebook_size: int, num_codes: int, codes_per_place: int = 1) -> None:
    """Checks that a model can read and write the codes of an image tokenizer.

    Args:
        codebook_size: number of different codes, of all codebooks.
        num_codes: codes of one picture.
        codes_per_place: those at each place of its grid.

    Raises:
        UserError: the model's vocabulary is too small, or its grid of codes has another size.
    """
    if codebook_size > model.image_vocab_size:
        raise UserError(
            f"the image tokenizer has {codebook_size} codes, but the model's image_vocab_size is "
            f"{model.image_vocab_size}: pretrain one with a text tokenizer that was made with --image-vocab-size "
            f"{codebook_size} or more, or train an image tokenizer with model.codebook_size "
            f"{model.image_vocab_size // codes_per_place}"
        )
    if (model.code_grid_size or model.codes_per_place > 1) and codes_per_place != model.codes_per_place:
        raise UserError(
            f"the image tokenizer has {codes_per_place} codes at each place, but the model's codes_per_place is "
            f"{model.codes_per_place}: pretrain one with m6.model.codes_per_place={codes_per_place}"
        )
    if model.codes_per_place > 1 and codebook_size != model.image_vocab_size:
        raise UserError(
            f"the image tokenizer has {codebook_size} codes in {codes_per_place} codebooks, but the model's "
            f"image_vocab_size, which it divides into as many books, is {model.image_vocab_size}: pretrain one with a "
            f"text tokenizer that was made with --image-vocab-size {codebook_size}"
        )
    places = num_codes // codes_per_place
    if model.code_grid_size and model.code_grid_size**2 != places:
        raise UserError(
            f"the image tokenizer has a grid of {places} codes, but the model's code_grid_size is "
            f"{model.code_grid_size}: pretrain one with {math.isqrt(places)}"
        )


def check_captions(
    config: ModelSettings, tokenizer: M6Tokenizer, captions: Sequence[str], num_codes: int, *, as_targets: bool = False
) -> None:
    """Raises UserError if a caption is empty, or if it or a picture is too long for the model's positions.

    With ``as_targets``, the captions are also targets, which <bos> and <eos> make longer.
    """
    limit = config.max_position_embeddings
    if num_codes + 4 > limit:  # <bos>, <boi>, <eoi> and <eos> stand around the codes
        raise UserError(
            f"a picture of {num_codes} codes does not fit into the model's max_position_embeddings {limit}; an image "
            "tokenizer of configs/image_tokenizer/pictures_64_small.json makes 64"
        )
    longest, does = (limit - 2, "writes") if as_targets else (limit, "reads")
    for caption in captions:
        length = len(tokenizer.encode_ids(caption))
        if length == 0:
            raise UserError(f"the caption {caption!r} is empty")
        if length > longest:
            raise UserError(f"the caption {caption[:20]!r}... has {length} tokens, the model {does} {longest}")


def unknown_characters(tokenizer: M6Tokenizer, text: str) -> str:
    """Returns the characters of a text for which the tokenizer has no piece, each once; it writes them as bytes."""
    is_byte = tokenizer.sp_model.is_byte
    return "".join(character for character in dict.fromkeys(text) if any(map(is_byte, tokenizer.encode_ids(character))))
