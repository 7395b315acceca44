"""A checkpoint of a Pseudo model read as one of the Real model, and ``m6 delink``, which writes it without a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from m6.architecture.sharing import Sharing
from m6.checkpoints.discovery import open_needed
from m6.checkpoints.format import (
    LATE_UPDATE,
    SHARD_BYTES,
    WEIGHT,
    CheckpointReader,
    Fragment,
    Range,
    write_manifest,
    write_shards,
)
from m6.checkpoints.tokenizers import copy_kept_tokenizers
from m6.config.run import load_config
from m6.errors import UserError
from m6.files import sync, sync_folder, write_text
from m6.lock import FolderLock
from m6.runs.directory import CAPTIONS, INITIAL, LAST_CHECKPOINT, SOURCES, RunDirectory
from m6.runs.processes import Runtime, on_main_rank

STATE = "pseudo_to_real"
"""The key of the phase (Pseudo or Real) in a checkpoint's state; absent in a run without a Pseudo phase."""


def is_pseudo(reader: CheckpointReader) -> bool:
    """Whether the checkpoint holds the weights of a Pseudo model."""
    return reader.state.get(STATE, {}).get("stage") == "pseudo"


class DelinkedReader(CheckpointReader):
    """Reads a Pseudo model's checkpoint as the Real model's: each layer gets a copy of the shared weights.

    Args:
        folder: a complete checkpoint of a Pseudo model.
        optimizer_state: ``copy``: each layer gets a copy of the moments. ``reset``: all moments are zero, and the
            number of optimizer steps is 0.
    """

    def __init__(self, folder: Path, optimizer_state: str = "copy") -> None:
        super().__init__(folder)
        self.reset = optimizer_state == "reset"
        self.sharing = sharing_of(self)
        self._ranges = {
            (real, kind): stored_ranges
            for (name, kind), stored_ranges in self._ranges.items()
            for real in self.sharing.real_names(name)
        }
        self.shapes = {key: stored_ranges[0].shape for key, stored_ranges in self._ranges.items()}
        self.state = real_state(self.state, self.reset)

    def read_into(self, name: str, kind: str, offset: int, target: Tensor) -> None:
        """Fills ``target`` as in ``CheckpointReader``; after a reset moments are zeros."""
        if self.reset and kind != WEIGHT:
            target.zero_()
        else:
            super().read_into(name, kind, offset, target)


def sharing_of(reader: CheckpointReader) -> Sharing:
    """The weight sharing of the Pseudo model of a checkpoint."""
    saved = reader.state[STATE]["sharing"]
    return Sharing(saved["num_layers"], saved["num_groups"], tuple(saved["parts"]))


def real_state(state: dict[str, Any], reset: bool) -> dict[str, Any]:
    """Converts the state of a Pseudo checkpoint to a Real checkpoint's state at the same step."""
    optimizer_step = 0 if reset else state["optimizer_step"]
    if reset:  # late gradients are dropped with the moments
        state = {key: value for key, value in state.items() if key != LATE_UPDATE}
    return {
        **state,
        "optimizer_step": optimizer_step,
        STATE: {**state[STATE], "stage": "real", "switch_step": state["step"]},
    }


# The weights and moments of one layer are divided into this many shards and pieces. The current shard, a copy of it in
# the serializer and the current piece must together stay below two layers.
_SHARDS_PER_LAYER, _PIECES_PER_LAYER = 2, 16


def delink_run(run_dir: Path, out: Path, runtime: Runtime) -> Path:
    """Writes the newest checkpoint of a Pseudo run as a Real run, for ``m6 pretrain`` to continue.

    Every rank calls this function. The ranks share the work, and each holds less than two layers' weights and moments
    at a time. The setting ``m6.pseudo_to_real.optimizer_state`` of the run decides whether moments are copied or
    reset. The metrics are copied too. ``out`` appears only when it is complete; ``run_dir`` is not changed.

    Returns:
        ``out``.

    Raises:
        UserError: the run has no Pseudo phase, is already Real, or has no complete checkpoint (the message names the
            missing or damaged file); ``out`` is not empty, or another process writes it.
    """
    config = load_config(run_dir / "config.json")
    if config.m6.pseudo_to_real is None:
        raise UserError(f"{run_dir}: has no m6.pseudo_to_real: its layers share no weights")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose another --out")
    reader = open_needed(RunDirectory(run_dir).checkpoints)
    if not is_pseudo(reader):
        raise UserError(f"{run_dir} is already Real: delinked after {reader.state[STATE]['switch_step']} steps")
    reset = config.m6.pseudo_to_real.optimizer_state == "reset"

    # Next to ``out``, hence on the same file system: the rename at the end is then atomic.
    temporary = RunDirectory(out.absolute().with_name(f".{out.name}.delink.tmp"))
    folder = temporary.checkpoints / reader.folder.name

    def prepare() -> None:
        shutil.rmtree(temporary.root, ignore_errors=True)
        folder.mkdir(parents=True)

    def write() -> None:
        pieces = _pieces(reader, reset, runtime.rank, runtime.world_size)
        write_shards(folder, runtime.rank, pieces, min(SHARD_BYTES, _layer_bytes(reader) // _SHARDS_PER_LAYER))

    def finish() -> None:
        write_manifest(folder, runtime.world_size, real_state(reader.state, reset))
        write_text(temporary.checkpoints / "latest", folder.name + "\n")
        write_text(temporary.root / LAST_CHECKPOINT, folder.name + "\n")
        temporary.open(config, runtime.world_size)  # the new run records this command as its first attempt
        copy_kept_tokenizers(run_dir, temporary.root)
        for record in (SOURCES, INITIAL, CAPTIONS):
            if (run_dir / record).exists():
                shutil.copyfile(run_dir / record, temporary.root / record)
        source = RunDirectory(run_dir)
        if source.metrics.exists():
            shutil.copyfile(source.metrics, temporary.metrics)
            temporary.cut_metrics_after(reader.state["step"])
        sync_folder(temporary.root)
        os.replace(temporary.root, out)  # atomic: ``out`` is never incomplete
        sync(out.absolute().parent)

    lock = FolderLock(out.absolute().with_name(f".{out.name}.lock"), out)
    on_main_rank(lock.acquire)
    try:
        for work, on_every_rank in ((prepare, False), (write, True), (finish, False)):
            problem = None
            if on_every_rank or runtime.is_main:
                try:
                    work()
                except (OSError, UserError) as error:
                    problem = str(error)
            # All ranks learn of a problem on any rank: otherwise the others would wait in the next collective.
            problems_of_ranks: list[str | None] = [None] * runtime.world_size
            dist.all_gather_object(problems_of_ranks, problem)
            if any(problems_of_ranks):
                if runtime.is_main:
                    shutil.rmtree(temporary.root, ignore_errors=True)
                raise UserError(f"{out} was not written: " + "; ".join(filter(None, problems_of_ranks)))
    finally:
        lock.release()
    return out


def _layer_bytes(reader: CheckpointReader) -> int:
    """Bytes of the weights and moments of the largest layer of the Pseudo model."""
    sharing, sizes = sharing_of(reader), dict.fromkeys(range(reader.state[STATE]["sharing"]["num_layers"]), 0)
    for stored in reader.ranges():
        for layer in sizes:
            prefix = f".layers.{layer}."
            if any(prefix in name for name in sharing.real_names(stored.name)):
                sizes[layer] += stored.numel * reader.element_size(stored)
    return max(sizes.values())


def _pieces(reader: CheckpointReader, reset: bool, rank: int, world_size: int) -> Iterator[Fragment]:
    """This rank's share of the Real model's state, read piece by piece."""
    sharing, limit = sharing_of(reader), max(1, _layer_bytes(reader) // _PIECES_PER_LAYER)
    number = 0
    for stored in reader.ranges():
        numel = max(1, limit // reader.element_size(stored))
        for begin in range(stored.offset, stored.offset + stored.numel, numel):
            number += 1
            # Round-robin: each rank gets a similar share of every layer.
            if number % world_size == rank:
                end = min(begin + numel, stored.offset + stored.numel)
                yield from _copies(reader.read_range(stored, begin, end), stored, begin, sharing, reset)


def _copies(data: Tensor, stored: Range, begin: int, sharing: Sharing, reset: bool) -> Iterator[Fragment]:
    """One fragment for each layer of the Real model with this range."""
    for name in sharing.real_names(stored.name):
        copy = data.new_zeros(data.shape) if reset and stored.kind != WEIGHT else data.clone()
        yield Fragment(name, stored.kind, begin, copy, stored.shape)
