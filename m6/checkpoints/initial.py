"""The start of an attempt: from its newest checkpoint, from the weights of another model or export, or random."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from m6.checkpoints.discovery import check_tokenizer_unchanged, complete_checkpoints, open_needed
from m6.checkpoints.finetuning import is_exported
from m6.checkpoints.format import WEIGHT, CheckpointReader, WeightReader, no_progress
from m6.checkpoints.loading import as_plain_model, newest_complete_checkpoint, open_exported
from m6.config.run import RunConfig
from m6.data.pretraining import PretrainingData
from m6.errors import UserError
from m6.runs.data import check_sources_are_read, check_sources_unchanged, data_warnings
from m6.runs.directory import RunDirectory
from m6.runs.environment import misplacement
from m6.tokenizers.text import M6Tokenizer, load_text_tokenizer


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


def open_initial_weights(init: Path, on_file: Callable[[], object] = no_progress) -> WeightReader:
    """Opens the weights of ``init``, a run or an exported model.

    Args:
        on_file: called for each file of a run after the comparison with its checksum.

    Raises:
        UserError: ``init`` is damaged or holds no model.
    """
    return ExportedWeights(init) if is_exported(init) else _open_checkpoint(init, on_file)


class ExportedWeights(WeightReader):
    """Reads ranges of the tensors of an exported model, as from a checkpoint.

    Raises:
        StorageError: a file cannot be opened.
        UserError: the folder is incomplete or damaged, or a tensor, not a counter, is of other types than floats.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = open_exported(folder)
        self.shapes = {(name, WEIGHT): tuple(self._slice(name).get_shape()) for name in self._files}

    def names(self, kind: str) -> list[str]:
        """The names of all weights; empty for other kinds, since an exported model has no optimizer state."""
        return list(self._files) if kind == WEIGHT else []

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` (1-D) with a range of the flat tensor; reads only rows with elements of the range."""
        shape = self.shapes[name, kind]
        if not shape:
            target.copy_(self._files[name].get_tensor(name).view(1))
            return
        row = math.prod(shape[1:])
        # safetensors slices along the first dimension without reading the rest: read only rows with elements in range.
        first, last = offset // row, -(-(offset + target.numel()) // row)
        begin = offset - first * row
        target.copy_(self._slice(name)[first:last].reshape(-1)[begin : begin + target.numel()])

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)


def _open_checkpoint(run: Path, on_file: Callable[[], object]) -> CheckpointReader:
    return as_plain_model(open_needed(RunDirectory(run).checkpoints, on_file))


def check_start(config: RunConfig, run: RunDirectory, data: PretrainingData, restart: bool) -> None:
    """Checks whether the attempt can continue its newest checkpoint, or begin with its initial weights; writes nothing.

    Args:
        restart: the attempt begins at step 0, whatever the run holds.

    Raises:
        UserError: the checkpoint was trained with another tokenizer or on other data, the initial weights are missing,
            or a new run names a source but does not read it.
    """
    if complete_checkpoints(run.checkpoints) and not restart:
        check_tokenizer_unchanged(run.checkpoints, data.tokenizer.fingerprint)
        check_sources_unchanged(run.root, data)
        return
    check_sources_are_read(data)
    if config.m6.init is not None:
        check_initial_weights(config.m6.init, data.tokenizer)


def warn_at_start(config: RunConfig, data: PretrainingData, nodes: Sequence[str]) -> None:
    """Warns of likely mistakes: a placement of ranks unlike the planner's, and data lost to the model.

    Args:
        nodes: the name of each rank's node.
    """
    for problem in filter(None, (misplacement(config, nodes), *data_warnings(config, data))):
        print(f"warning: {problem}", file=sys.stderr)
