"""A run's weights outside of training: in memory, or as a folder that ``from_pretrained`` reads."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from m6.config import RunConfig, load_config
from m6.errors import UserError, nearest
from m6.files import sync, write_json
from m6.model import M6Config, M6ForConditionalGeneration
from m6.tokenizers.processor import M6ImageProcessor, M6Processor
from m6.tokenizers.text import M6Tokenizer, load_text_tokenizer
from m6.training.checkpoint import complete_checkpoints
from m6.training.checkpoint_format import CheckpointReader
from m6.training.delinked_reader import DelinkedReader, is_pseudo
from m6.training.fragments import WEIGHT
from m6.training.run_directory import RunDirectory

if TYPE_CHECKING:
    from m6.tokenizers.image import ImageTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
IMAGE_TOKENIZER = "image_tokenizer"
"""The folder inside of an exported model that holds the image tokenizer."""


def export_hf(run_dir: Path, out: Path, dtype: str = "float32", max_shard_bytes: int = 4 << 30) -> None:
    """Writes the newest checkpoint of a run in Hugging Face's format: model, tokenizer and processor.

    Weights stream from checkpoint to shard: one shard is in memory at a time. ``out`` appears when it is whole.

    Args:
        run_dir: a run with a complete checkpoint.
        out: must not exist, or be an empty folder.
        dtype: of the floating-point weights, a key of ``DTYPES``.
        max_shard_bytes: of one file; a single larger tensor has a file of its own.

    Raises:
        UserError: nothing to export, a damaged shard (named), or ``out`` is not free.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype: unknown type {dtype!r}{nearest(dtype, DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose another one")
    config = load_config(run_dir / "config.json")
    reader = open_newest_checkpoint(run_dir)
    processor = run_processor(config, reader)
    temporary = out.absolute().with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
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
            sync(file)
        os.replace(temporary, out)
        sync(out.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_run_model(folder: Path, device: torch.device) -> tuple[M6ForConditionalGeneration, M6Processor]:
    """The model and processor of a run's newest checkpoint, or of an exported folder, for inference.

    Args:
        folder: a run (its config.json has the section "m6") or what ``export_hf`` wrote.

    Raises:
        UserError: the folder is neither, or its weights are missing or damaged.
    """
    if is_exported(folder):
        try:
            model = M6ForConditionalGeneration.from_pretrained(folder)
            return model.to(device).eval(), M6Processor.from_pretrained(folder)  # type: ignore[arg-type]
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder}: not a whole exported model: {error}") from None
    config = load_config(folder / "config.json")
    reader = open_newest_checkpoint(folder)
    processor = run_processor(config, reader)
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    model.to_empty(device=device)
    load_weights(model, reader)
    return model.eval(), processor


def load_run_image_tokenizer(folder: Path) -> ImageTokenizer:
    """The image tokenizer of a run, or of an exported folder.

    Raises:
        UserError: the model has not learned to draw, or the run's image tokenizer is no longer the one it learned from.
    """
    from m6.tokenizers.image import load_image_tokenizer

    if is_exported(folder):
        if not (folder / IMAGE_TOKENIZER).is_dir():
            raise UserError(f"{folder}: the model does not draw: it has no folder {IMAGE_TOKENIZER}")
        return load_image_tokenizer(folder / IMAGE_TOKENIZER)
    path = load_config(folder / "config.json").m6.data.image_tokenizer
    trained_with = newest_complete_checkpoint(folder).state.get("image_tokenizer")
    if path is None or trained_with is None:
        raise UserError(f"{folder}: the model does not draw: it has not been trained with m6.objectives.text_to_image")
    image_tokenizer = load_image_tokenizer(path)
    if image_tokenizer.checksum != trained_with:
        raise UserError(f"{path}: not the image tokenizer that {folder} was trained with")
    return image_tokenizer


def open_newest_checkpoint(run_dir: Path) -> CheckpointReader:
    """The newest complete checkpoint, its files checked against their checksums; one of a Pseudo model is read as the
    Real model, which computes the same."""
    reader = newest_complete_checkpoint(run_dir)
    problems = reader.verify()
    if problems:
        raise UserError("; ".join(problems))
    return DelinkedReader(reader.folder) if is_pseudo(reader) else reader


def newest_complete_checkpoint(run_dir: Path) -> CheckpointReader:
    """The newest complete checkpoint of a run, its shards not yet checked; UserError when there is none."""
    root = RunDirectory(run_dir).checkpoints
    folders = complete_checkpoints(root)
    if not folders:
        raise UserError(f"{root} holds no complete checkpoint")
    return CheckpointReader(folders[-1])


def load_weights(model: M6ForConditionalGeneration, reader: CheckpointReader) -> None:
    """Fills every parameter and buffer, one tensor at a time."""
    for name, tensor in model.state_dict().items():
        _check_shape(reader, name, tensor)
        reader.read_into(name, WEIGHT, 0, tensor.view(-1))


def run_processor(config: RunConfig, reader: CheckpointReader) -> M6Processor:
    """What turns prompts into the inputs of a run's model; UserError if the tokenizer is no longer the run's."""
    tokenizer = load_text_tokenizer(config.m6.data.tokenizer)
    if tokenizer.fingerprint != reader.state["tokenizer"]:
        raise UserError(f"{config.m6.data.tokenizer}: not the tokenizer that {reader.folder} was trained with")
    return make_processor(config, tokenizer)


def make_processor(config: RunConfig, tokenizer: M6Tokenizer) -> M6Processor:
    """The processor of a run's model."""
    side = config.model.image_size
    image_processor = M6ImageProcessor(size={"height": side, "width": side})
    return M6Processor(image_processor, tokenizer, num_patches=config.model.num_patches)


def _write_weights(
    folder: Path, reader: CheckpointReader, config: M6Config, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config)
    model.generation_config.save_pretrained(folder)
    tensors = model.to(dtype).state_dict()  # type: ignore[arg-type]
    for name, tensor in tensors.items():
        _check_shape(reader, name, tensor)
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
    """Names in the order of the model, split where a shard would exceed ``max_bytes``."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _check_shape(reader: CheckpointReader, name: str, tensor: Tensor) -> None:
    stored = reader.shapes.get((name, WEIGHT))
    if stored != tuple(tensor.shape):
        raise UserError(f"{reader.folder}: {name} has shape {stored}, the model has {tuple(tensor.shape)}")


def is_exported(folder: Path) -> bool:
    """Whether the folder holds an exported model, not a run; UserError if neither."""
    file = folder / "config.json"
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{folder}: neither a run nor an exported model (no readable config.json)") from None
    if not isinstance(content, dict) or not ("m6" in content or content.get("model_type") == M6Config.model_type):
        raise UserError(f"{file}: belongs neither to a run nor to an exported model")
    return "m6" not in content
