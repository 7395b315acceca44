"""The weights of a checkpoint as safetensors files, as ``from_pretrained`` reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file

from m6.checkpoints.format import CheckpointReader
from m6.checkpoints.fragment import WEIGHT
from m6.checkpoints.loading import INDEX, WEIGHTS, check_shape
from m6.files import write_json
from m6.model import M6ForConditionalGeneration


def write_weights(
    folder: Path, reader: CheckpointReader, model: M6ForConditionalGeneration, max_shard_bytes: int
) -> None:
    """Writes ``model.safetensors``, or numbered shards and their index, with one shard in memory at a time.

    Args:
        folder: where the files are written.
        reader: of the checkpoint.
        model: on the meta device: its names, shapes and types are those of the weights to write.
        max_shard_bytes: limit of a file. A tensor that is larger gets its own file.

    Raises:
        UserError: a weight is missing in the checkpoint, or has another shape.
    """
    tensors = model.state_dict()
    for name, tensor in tensors.items():  # before the first shard is written
        check_shape(reader, name, tensor)
    # huggingface_hub's split_torch_state_dict_into_shards asks for storages, which a tensor on meta does not have.
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
