"""A run's newest checkpoint as a folder for ``from_pretrained``, with or without this project, and its upload.

Its weights are written as safetensors files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, get_token, split_state_dict_into_shards_factory
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from safetensors.torch import save_file

from m6.architecture.configuration import M6Config
from m6.checkpoints.format import WEIGHT, CheckpointReader
from m6.checkpoints.loading import (
    INDEX,
    WEIGHTS,
    check_shape,
    keep_learned,
    load_run_image_tokenizer,
    open_newest_checkpoint,
    run_processor,
    without_capacity,
)
from m6.checkpoints.provenance import initial_record, write_record
from m6.checkpoints.tokenizers import IMAGE_TOKENIZER
from m6.config.run import load_config
from m6.errors import UserError, first_line, nearest
from m6.export.card import model_card
from m6.export.code import AUTO_MAP, write_code
from m6.files import write_json
from m6.lock import new_folder
from m6.model import M6ForConditionalGeneration
from m6.runs.data import kept_captions, write_captions


def write_weights(
    folder: Path, reader: CheckpointReader, model: M6ForConditionalGeneration, max_shard_bytes: int
) -> None:
    """Writes ``model.safetensors``, or numbered shards and their index, with one shard in memory at a time.

    Args:
        folder: where the files are written.
        reader: of the checkpoint.
        model: on the meta device: it gives the names, shapes and types of the weights.
        max_shard_bytes: limit of a file. A larger tensor gets its own file.

    Raises:
        UserError: a weight is missing in the checkpoint, or has another shape.
    """
    tensors = model.state_dict()
    for name, tensor in tensors.items():  # before the first shard is written
        check_shape(reader, name, tensor)
    # huggingface_hub's split_torch_state_dict_into_shards asks for storages, and tensors on meta have none.
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=WEIGHTS.replace(".", "{suffix}."),
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        shard = {}
        for name in names:
            shard[name] = torch.empty_like(tensors[name], device="cpu")
            reader.read_into(name, WEIGHT, 0, shard[name].view(-1))
        save_file(shard, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CARD = "README.md"


def export_hf(
    run_dir: Path, out: Path, dtype: str = "float32", max_shard_bytes: int = 4 << 30, licence: str | None = None
) -> None:
    """Writes the newest checkpoint of a run in Hugging Face's format: model, processor, modelling code and model card.

    Weights stream from checkpoint to shard: only one shard is in memory at a time. The folder is written under a
    temporary name and renamed to ``out`` when it is complete.

    Args:
        run_dir: a run with a complete checkpoint.
        out: a new or empty folder.
        dtype: type of the floating-point weights, a key of ``DTYPES``.
        max_shard_bytes: limit of a weight file. A larger tensor gets its own file.
        licence: of the weights, for the model card; None: not stated.

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
            model_config = M6Config.of(without_capacity(config.model))
            model_config.architectures, model_config.dtype = [M6ForConditionalGeneration.__name__], dtype
            # On the meta device the model gives names and shapes without memory for its weights.
            with torch.device("meta"):
                model = M6ForConditionalGeneration(model_config).to(DTYPES[dtype])  # type: ignore[arg-type]
            write_weights(temporary, reader, model, max_shard_bytes)
            # transformers' pipelines would ask for 256 tokens. Half of the positions leaves room for a prompt's target.
            model.generation_config.max_new_tokens = min(256, model_config.max_position_embeddings // 2)
            keep_learned(model, config)
            model.generation_config.save_pretrained(temporary)
            model_config.save_pretrained(temporary)
            processor.save_pretrained(temporary)
            write_code(temporary)
            _set_auto_maps(temporary)
            write_record(temporary, initial_record(run_dir, reader.state))
            if (seen := kept_captions(run_dir)) is not None:
                write_captions(temporary, seen)
            model_card(run_dir, config, reader, dtype, licence).save(temporary / CARD)
            if reader.state.get("image_tokenizer") is not None:
                load_run_image_tokenizer(run_dir).save_pretrained(temporary / IMAGE_TOKENIZER)
            mode = (temporary / "config.json").stat().st_mode
            for file in (path for path in temporary.rglob("*") if path.is_file()):
                file.chmod(mode)  # only the owner may read files made by safetensors
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} cannot be written: {error}") from None


def _set_auto_maps(folder: Path) -> None:
    """Names the classes of the modelling code in the JSON files of the model, the processor and the tokenizer."""
    for file, key in (
        ("config.json", None),
        ("processor_config.json", None),
        ("processor_config.json", "image_processor"),
        ("tokenizer_config.json", None),
    ):
        document: dict[str, Any] = json.loads((folder / file).read_text(encoding="utf-8"))
        section = document if key is None else document[key]
        section["auto_map"] = AUTO_MAP
        write_json(folder / file, document)


def check_push(name: str) -> None:
    """Checks the name, the network and the token of an upload, before the export.

    Raises:
        UserError: one of them is missing or invalid.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--push {name!r}: {error}") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"--push {name}: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or leave out --push"
        )
    if get_token() is None:
        raise UserError(f'--push {name}: no token for the Hub; run "hf auth login", or set HF_TOKEN')


def push(folder: Path, name: str) -> str:
    """Uploads an exported model; the repository is made private if it does not exist.

    Args:
        folder: written by ``export_hf``.
        name: of the repository, such as ``user/model``.

    Returns:
        the address of the upload.

    Raises:
        UserError: the Hub cannot be reached, or refuses; the folder stays and can be uploaded later.
    """
    check_push(name)
    api = HfApi()
    try:
        repository = api.create_repo(name, private=True, exist_ok=True).repo_id
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Upload {folder.name}")
    except (HTTPError, OSError) as error:
        raise UserError(
            f"--push {name}: {first_line(error)}; the model is in {folder}: hf upload {name} {folder}"
        ) from None
    return commit.commit_url
