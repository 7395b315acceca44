"""Loads the model, the processor and the image tokenizer of a run or of an exported model, for inference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from m6.architecture.settings import ModelSettings
from m6.checkpoints.adapters import MergedReader, is_adapted
from m6.checkpoints.delink import DelinkedReader, is_pseudo
from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.finetuning import is_exported
from m6.checkpoints.format import COUNTER, FLOATS, WEIGHT, CheckpointReader, WeightReader, open_weights
from m6.checkpoints.tokenizers import IMAGE_TOKENIZER, TOKENIZER, find_tokenizer
from m6.config.run import RunConfig, load_config
from m6.decoding import TEMPERATURE, Decoding, temperature_refusal
from m6.errors import DAMAGED, StorageError, UserError, nearest
from m6.files import parse_object, reading
from m6.model import M6Config, M6ForConditionalGeneration
from m6.runs.directory import RunDirectory
from m6.tokenizers.processor import M6ImageProcessor, M6Processor
from m6.tokenizers.text import MODEL_FILE, M6Tokenizer, load_text_tokenizer
from m6.validation import read_document

if TYPE_CHECKING:
    from m6.tokenizers.image import ImageTokenizer

WEIGHTS = "model.safetensors"
"""The weights of an exported model. Several files have numbers in their names, and an index names them."""
INDEX = f"{WEIGHTS}.index.json"
_Settings = TypeVar("_Settings", bound=ModelSettings)


def load_run_model(folder: Path, device: torch.device) -> tuple[M6ForConditionalGeneration, M6Processor]:
    """Loads the model and the processor of a run's newest checkpoint or of an exported model, for inference.

    Args:
        folder: a run, or a folder written by ``m6 export``.

    Raises:
        UserError: the folder is neither, or its weights are missing or damaged.
    """
    if is_exported(folder):
        model, processor = _load_exported(folder)
        return model.to(device).eval(), processor  # type: ignore[arg-type]  # as a decorator of transformers types it
    config = load_config(folder / "config.json")
    reader = open_newest_checkpoint(folder)
    processor = run_processor(folder, config, reader)
    # On the meta device: initial values would be overwritten, and random numbers take long for a large model.
    with torch.device("meta"):
        model = M6ForConditionalGeneration(without_capacity(config.model))
    model.to_empty(device=device)
    load_weights(model, reader)
    keep_learned(model, config)
    return model.eval(), processor


def keep_learned(model: M6ForConditionalGeneration, config: RunConfig) -> None:
    """Sets the decodings, objectives and sampling temperature of a model by its run's configuration."""
    objectives = config.m6.objectives
    model.decodings, model.learned_objectives = objectives.decodings, objectives.active
    if objectives.decodings:
        model.code_temperature = TEMPERATURE


def without_capacity(config: _Settings) -> _Settings:
    """A copy without ``eval_capacity_factor``, so an answer does not depend on the other samples of its batch.

    With a capacity the tokens of a batch compete for experts. It bounds the memory of validation during training.
    """
    copied = copy.deepcopy(config)
    if copied.moe is not None:
        copied.moe.pop("eval_capacity_factor", None)
    return copied


def _load_exported(folder: Path) -> tuple[M6ForConditionalGeneration, M6Processor]:
    """Loads an exported model and refuses it where transformers only warns.

    transformers makes random weights in place of missing ones, and takes its defaults for a missing or damaged
    ``generation_config.json``.
    """
    read_document(folder / "generation_config.json")
    open_exported(folder)  # transformers converts integers without a message
    try:
        config = without_capacity(M6Config.from_pretrained(folder))
        loaded: Any = M6ForConditionalGeneration.from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,  # or a missing file would let it unpickle pytorch_model.bin
        )
    except (*DAMAGED, SafetensorError) as error:
        raise UserError(f"{folder}: not a complete exported model: {error}") from None
    model, found = loaded
    for problem in ("missing", "unexpected", "mismatched"):
        if keys := sorted(map(str, found[f"{problem}_keys"])):
            raise UserError(f"{folder}: {len(keys)} {problem} weights for its config.json, such as {keys[0]}")
    ways: Any = model.decodings
    for way in ways if isinstance(ways, list) else [ways]:
        if way not in (valid := get_args(Decoding)):
            raise UserError(
                f'{folder / "generation_config.json"}: unknown way to draw "{way}"{nearest(str(way), valid)}'
            )
    if (refusal := temperature_refusal(model.code_temperature)) is not None:
        raise UserError(f"{folder / 'generation_config.json'}: code_temperature {refusal}")
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = getattr(model.generation_config, key)
        if not all(type(each) is int for each in (ids if isinstance(ids, list) else [ids])):
            raise UserError(f"{folder / 'generation_config.json'}: {key} is {ids!r:.80}, expected the id of a token")
    tokenizer = load_text_tokenizer(folder)
    for name, file in (("text_vocab_size", MODEL_FILE), ("image_vocab_size", "tokenizer_config.json")):
        actual, expected = getattr(tokenizer, name), getattr(model.config, name)
        if actual != expected:
            raise UserError(f"{folder / file}: {name} is {actual}, but {expected} in config.json")
    return model, make_processor(model.config, tokenizer)


def open_exported(folder: Path) -> dict[str, safe_open]:
    """Opens the weights of an exported model. Returns the open file of each tensor, by the tensor's name.

    Raises:
        StorageError: a file cannot be opened.
        UserError: the folder is incomplete or damaged, or a tensor, not a counter, is of other types than floats.
    """
    try:
        names = _files_of_tensors(folder)
        files = {name: open_weights(folder / name) for name in set(names.values())}
        tensors = {tensor: files[name] for tensor, name in names.items()}
        for tensor, file in tensors.items():
            dtype = file.get_slice(tensor).get_dtype()
            if dtype not in FLOATS and not (dtype == "I64" and tensor.endswith(COUNTER)):
                raise ValueError(f"{tensor} is {dtype}, expected {' or '.join(FLOATS)}")
    except StorageError:
        raise
    except (*DAMAGED, SafetensorError) as error:
        raise UserError(f"{folder}: not a complete exported model: {error}") from None
    return tensors


def _files_of_tensors(folder: Path) -> dict[str, str]:
    """The name of the file of each tensor of an exported model, by the tensor's name."""
    if (folder / INDEX).is_file():
        with reading(folder / INDEX):
            files: dict[str, str] = parse_object((folder / INDEX).read_bytes())["weight_map"]
        for file in files.values():
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{INDEX} names {file!r}, which is no file in it")
        return files
    with open_weights(folder / WEIGHTS) as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def load_run_image_tokenizer(folder: Path) -> ImageTokenizer:
    """Loads the image tokenizer of a run or of an exported model.

    Raises:
        UserError: the model was not trained to draw images, or the image tokenizer changed after the training.
    """
    # Imported here: only drawing needs its packages.
    from m6.tokenizers.image import load_image_tokenizer

    if is_exported(folder):
        if not (folder / IMAGE_TOKENIZER).is_dir():
            raise UserError(f"{folder}: the model does not draw: it has no folder {IMAGE_TOKENIZER}")
        return load_image_tokenizer(folder / IMAGE_TOKENIZER)
    path = load_config(folder / "config.json").m6.data.image_tokenizer
    trained_with = newest_complete_checkpoint(folder).state.get("image_tokenizer")
    if path is None or trained_with is None:
        raise UserError(
            f"{folder}: the model does not draw: it has not been trained with m6.objectives.image_code_denoising "
            "or text_to_image"
        )
    found = find_tokenizer(folder, IMAGE_TOKENIZER, path)
    image_tokenizer = load_image_tokenizer(found)
    if image_tokenizer.checksum != trained_with:
        raise UserError(f"{found}: not the image tokenizer that {folder} was trained with")
    return image_tokenizer


def open_newest_checkpoint(run_dir: Path) -> CheckpointReader:
    """Opens the newest complete checkpoint of a run as ``open_plain_model`` does.

    Raises:
        UserError: there is no complete checkpoint, or it is damaged.
    """
    return open_plain_model(newest_complete_checkpoint(run_dir))


def open_plain_model(reader: CheckpointReader) -> CheckpointReader:
    """Checks the checksums of a checkpoint, and opens it as ``as_plain_model`` does; UserError if it is damaged."""
    problems = reader.verify()
    if problems:
        raise UserError("; ".join(problems))
    return as_plain_model(reader)


def as_plain_model(reader: CheckpointReader) -> CheckpointReader:
    """Reads a checkpoint of a Pseudo model, or with adapters, as a checkpoint of an equivalent plain model."""
    if is_pseudo(reader):
        return DelinkedReader(reader.folder)
    return MergedReader(reader.folder) if is_adapted(reader) else reader


def newest_complete_checkpoint(run_dir: Path) -> CheckpointReader:
    """Opens the newest complete checkpoint of a run without a check of its shards; UserError if there is none."""
    root = RunDirectory(run_dir).checkpoints
    folders = complete_checkpoints(root)
    if not folders:
        raise UserError(f"{root} holds no complete checkpoint")
    return CheckpointReader(folders[-1])


def load_weights(model: M6ForConditionalGeneration, reader: WeightReader) -> None:
    """Fills every parameter and buffer of the model, one tensor at a time; UserError if a shape differs."""
    for name, tensor in model.state_dict().items():
        check_shape(reader, name, tensor)
        reader.read_into(name, WEIGHT, 0, tensor.view(-1))


def check_shape(reader: WeightReader, name: str, tensor: Tensor) -> None:
    """Raises UserError if the checkpoint has no weight ``name`` with the shape of ``tensor``."""
    stored = reader.shapes.get((name, WEIGHT))
    if stored != tuple(tensor.shape):
        raise UserError(f"{reader.folder}: {name} has shape {stored}, the model has {tuple(tensor.shape)}")


def run_processor(root: Path, config: RunConfig, reader: CheckpointReader) -> M6Processor:
    """Makes the processor of the model of the run in ``root``; UserError if its tokenizer is missing or another one."""
    folder = find_tokenizer(root, TOKENIZER, config.m6.data.tokenizer)
    tokenizer = load_text_tokenizer(folder)
    if tokenizer.fingerprint != reader.state["tokenizer"]:
        raise UserError(f"{folder}: not the tokenizer that {reader.folder} was trained with")
    return make_processor(config.model, tokenizer)


def make_processor(config: ModelSettings, tokenizer: M6Tokenizer) -> M6Processor:
    """Makes the processor of prompts and images for a model."""
    side = config.image_size
    tokenizer.model_max_length = config.max_position_embeddings  # the limit for transformers' truncation=True
    image_processor = M6ImageProcessor(size={"height": side, "width": side})
    return M6Processor(image_processor, tokenizer, num_patches=config.num_patches)
