"""Export of a run's newest checkpoint to a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from m6.checkpoints.format import CheckpointReader
from m6.checkpoints.fragment import WEIGHT
from m6.checkpoints.loading import (
    INDEX,
    check_shape,
    load_run_image_tokenizer,
    open_newest_checkpoint,
    run_processor,
)
from m6.checkpoints.tokenizers import IMAGE_TOKENIZER
from m6.config.run import load_config
from m6.errors import UserError, nearest
from m6.files import write_json
from m6.lock import new_folder
from m6.model import M6Config, M6ForConditionalGeneration

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_hf(run_dir: Path, out: Path, dtype: str = "float32", max_shard_bytes: int = 4 << 30) -> None:
    """Writes the newest checkpoint of a run in Hugging Face's format: model, tokenizer and processor.

    Weights stream from checkpoint to shard: only one shard is in memory at a time. The folder is written under a
    temporary name and renamed to ``out`` when it is complete.

    Args:
        run_dir: a run with a complete checkpoint.
        out: a folder that does not exist or is empty.
        dtype: type of the floating-point weights, a key of ``DTYPES``.
        max_shard_bytes: limit of a weight file. A tensor that is larger gets its own file.

    Raises:
        UserError: the run has no checkpoint, a shard is damaged (the message names it), or ``out`` is not empty.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype: unknown type {dtype!r}{nearest(dtype, DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose another one")
    config = load_config(run_dir / "config.json")
    reader = open_newest_checkpoint(run_dir)
    processor = run_processor(run_dir, config, reader)
    try:
        with new_folder(out.absolute()) as temporary:
            model_config = copy.deepcopy(config.model)
            model_config.architectures, model_config.dtype = [M6ForConditionalGeneration.__name__], dtype
            _write_weights(temporary, reader, model_config, DTYPES[dtype], max_shard_bytes)
            model_config.save_pretrained(temporary)
            processor.save_pretrained(temporary)
            if reader.state.get("image_tokenizer") is not None:
                load_run_image_tokenizer(run_dir).save_pretrained(temporary / IMAGE_TOKENIZER)
            mode = (temporary / "config.json").stat().st_mode
            for file in (path for path in temporary.rglob("*") if path.is_file()):
                file.chmod(mode)  # safetensors makes files that only their owner may read
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {error}") from None


def _write_weights(
    folder: Path, reader: CheckpointReader, config: M6Config, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """Writes the weights as safetensors shards and their index."""
    # On the meta device the model gives names and shapes without memory for its weights.
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config)
    model.generation_config.save_pretrained(folder)
    tensors = model.to(dtype).state_dict()  # type: ignore[arg-type]
    for name, tensor in tensors.items():  # before the first shard is written
        check_shape(reader, name, tensor)
    shards = list(_shards(tensors, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard = {}
        for name in names:
            shard[name] = torch.empty_like(tensors[name], device="cpu")
            reader.read_into(name, WEIGHT, 0, shard[name].view(-1))
            weight_map[name] = file
        save_file(shard, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: dict[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    """Splits the names, in the order of the model, into shards of at most ``max_bytes``."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names
