"""Initial weights for fine-tuning: those of another run or of an exported model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from m6.architecture.configuration import M6Config
from m6.checkpoints.discovery import open_needed
from m6.checkpoints.format import CheckpointReader, WeightReader, no_sign, open_weights
from m6.checkpoints.fragment import WEIGHT
from m6.checkpoints.loading import INDEX, WEIGHTS, as_plain_model, is_exported, newest_complete_checkpoint
from m6.config.run import RunConfig, load_config, parse_document
from m6.errors import StorageError, UserError
from m6.files import reading
from m6.runs.directory import RunDirectory
from m6.shipped import shipped_file
from m6.tokenizers.text import M6Tokenizer, load_text_tokenizer
from m6.validation import read_document


def load_finetuning_config(
    path: Path, init: Path, overrides: tuple[str, ...] = (), *, from_scratch: bool = False
) -> RunConfig:
    """Reads a run's JSON and takes the model's configuration from ``init``.

    Values of m6.model and m6.moe in the JSON, such as a dropout rate, override those of ``init``. The returned
    configuration is complete and no longer depends on ``init``.

    Args:
        path: the JSON file, or the name of a shipped one.
        init: the folder of a run, or one that ``m6 export`` wrote.
        overrides: see ``load_config``.
        from_scratch: whether the run begins with random weights, and takes nothing else from ``init``.

    Raises:
        UserError: as in ``load_config``; or ``init`` is neither a run nor an exported model.
    """
    path = shipped_file(path, "configuration")
    document = read_document(path, overrides)
    section = document.get("m6")
    if isinstance(section, dict):
        if not from_scratch:
            section["init"] = str(init)
        for name, inherited in _model_sections(init).items():
            own = section.get(name, {})
            if isinstance(own, dict):  # its values win over those of ``init``; another type is refused below
                section[name] = {**inherited, **own}
            elif own is None:
                raise UserError(f"{path}: m6.{name} is null, but {init} has one; leave the key out")
    return parse_document(path, document)


def check_initial_weights(init: Path, tokenizer: M6Tokenizer) -> None:
    """Raises UserError if ``init`` has no weights or was trained with another tokenizer; writes nothing."""
    if is_exported(init):
        fingerprint = load_text_tokenizer(init).fingerprint
    else:
        fingerprint = newest_complete_checkpoint(init).state["tokenizer"]
    if fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"m6.data.tokenizer is not the one that {init} was trained with (fingerprint "
            f"{tokenizer.fingerprint[:12]} instead of {fingerprint[:12]}): its ids stand for other text"
        )


def open_initial_weights(init: Path, on_file: Callable[[], object] = no_sign) -> WeightReader:
    """Opens the weights of ``init``, a run or an exported model.

    Args:
        on_file: called for each file of a run that was compared with its checksum.

    Raises:
        UserError: ``init`` is damaged or holds no model.
    """
    return ExportedWeights(init) if is_exported(init) else _open_checkpoint(init, on_file)


class ExportedWeights(WeightReader):
    """Reads ranges of the tensors of an exported model, like those of a checkpoint.

    Raises:
        StorageError: a file cannot be opened.
        UserError: the folder is incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._files = _files_of_tensors(folder)
            self._open = {file: open_weights(folder / file) for file in set(self._files.values())}
            self.shapes = {(name, WEIGHT): tuple(self._slice(name).get_shape()) for name in self._files}
        except StorageError:
            raise
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(f"{folder}: not a complete exported model: {error}") from None

    def names(self, kind: str) -> list[str]:
        """The names of all weights; empty for other kinds, since an exported model has no optimizer state."""
        return list(self._files) if kind == WEIGHT else []

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` (1-D) with a range of the flat tensor; reads only the rows that contain the range."""
        shape = self.shapes[name, kind]
        if not shape:
            target.copy_(self._open[self._files[name]].get_tensor(name).view(1))
            return
        row = math.prod(shape[1:])
        # safetensors slices along the first dimension without reading the rest: read the rows that contain the range.
        first, last = offset // row, -(-(offset + target.numel()) // row)
        begin = offset - first * row
        target.copy_(self._slice(name)[first:last].reshape(-1)[begin : begin + target.numel()])

    def _slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)


def _files_of_tensors(folder: Path) -> dict[str, str]:
    """The name of the file that holds each tensor of an exported model."""
    if (folder / INDEX).is_file():
        with reading(folder / INDEX):
            return json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    with open_weights(folder / WEIGHTS) as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def _open_checkpoint(run: Path, on_file: Callable[[], object]) -> CheckpointReader:
    return as_plain_model(open_needed(RunDirectory(run).checkpoints, on_file))


def _model_sections(init: Path) -> dict[str, dict[str, Any]]:
    """The section "model" and, if the model is sparse, the section "moe" of a run or of an exported model."""
    if is_exported(init):
        document = json.loads((init / "config.json").read_text(encoding="utf-8"))
        # Of a dataclass that inherits fields, __annotations__ holds those that M6Config itself declares.
        names = {field.name for field in fields(M6Config) if field.name in M6Config.__annotations__}
        sections = {
            "model": {key: document[key] for key in names - {"moe"} if key in document},
            "moe": document.get("moe"),
        }
    else:
        document = load_config(init / "config.json").document["m6"]
        sections = {name: document.get(name) for name in ("model", "moe")}
    return {name: section for name, section in sections.items() if section is not None}
