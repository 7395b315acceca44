"""``m6 delink``: a checkpoint of a Pseudo run becomes a Real run of its own, without a model in memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from m6.checkpoints.delinked import STATE, is_pseudo, real_state, sharing_of
from m6.checkpoints.discovery import complete_checkpoints, open_together
from m6.checkpoints.format import SHARD_BYTES, CheckpointReader, Range, write_manifest, write_shards
from m6.checkpoints.fragment import WEIGHT, Fragment
from m6.config.run import load_config
from m6.errors import UserError
from m6.files import sync, write_text
from m6.model.sharing import Sharing
from m6.runs.directory import RunDirectory
from m6.runs.lock import FolderLock
from m6.runs.processes import Runtime, on_main_rank

# How many shards, and how many pieces that are read at a time, hold one layer's weights and moments: what is
# collected, what the serializer may copy and what is being read together stay below two layers.
_SHARDS_PER_LAYER, _PIECES_PER_LAYER = 2, 16


def delink_run(run_dir: Path, out: Path, runtime: Runtime) -> Path:
    """Writes the newest checkpoint of a Pseudo run as a Real run that ``m6 pretrain`` goes on with.

    The ranks share the work, and each holds less than two layers' weights and moments at a time. Moments are copied
    or reset as ``m6.pseudo_to_real.optimizer_state`` of the run says. The metrics so far come along. ``out`` appears
    when it is whole; ``run_dir`` is only read. To be called on every rank.

    Raises:
        UserError: the run has no Pseudo stage, is already Real or has no whole checkpoint (the file that is missing
            or damaged is named), ``out`` is not free, or another process writes it.
    """
    config = load_config(run_dir / "config.json")
    if config.m6.pseudo_to_real is None:
        raise UserError(f"{run_dir}: has no m6.pseudo_to_real: its layers share nothing that could be delinked")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder; choose another --out")
    folders = complete_checkpoints(RunDirectory(run_dir).checkpoints)
    if not folders:
        raise UserError(f"{RunDirectory(run_dir).checkpoints} holds no complete checkpoint")
    reader, problems = open_together(folders[-1])
    if reader is None:
        raise UserError("; ".join(problems))
    if not is_pseudo(reader):
        raise UserError(f"{run_dir} is already Real: delinked after {reader.state[STATE]['switch_step']} steps")
    reset = config.m6.pseudo_to_real.optimizer_state == "reset"

    temporary = RunDirectory(out.absolute().with_name(f".{out.name}.delink.tmp"))
    folder = temporary.checkpoints / folders[-1].name

    def prepare() -> None:
        shutil.rmtree(temporary.root, ignore_errors=True)
        folder.mkdir(parents=True)

    def write() -> None:
        pieces = _pieces(reader, reset, runtime.rank, runtime.world_size)
        write_shards(folder, runtime.rank, pieces, min(SHARD_BYTES, _layer_bytes(reader) // _SHARDS_PER_LAYER))

    def finish() -> None:
        write_manifest(folder, runtime.world_size, real_state(reader.state, reset))
        write_text(temporary.checkpoints / "latest", folder.name + "\n")
        temporary.open(config, runtime.world_size)
        source = RunDirectory(run_dir)
        if source.metrics.exists():
            shutil.copyfile(source.metrics, temporary.metrics)
            temporary.cut_metrics_after(reader.state["step"])
        os.replace(temporary.root, out)
        sync(out.absolute().parent)

    lock = FolderLock(out.absolute().with_name(f".{out.name}.lock"), out)
    on_main_rank(runtime, lock.acquire)
    try:
        for work, everywhere in ((prepare, False), (write, True), (finish, False)):
            problem = None
            if everywhere or runtime.is_main:
                try:
                    work()
                except (OSError, UserError) as error:
                    problem = str(error)
            found: list[str | None] = [None] * runtime.world_size
            dist.all_gather_object(found, problem)
            if any(found):
                if runtime.is_main:
                    shutil.rmtree(temporary.root, ignore_errors=True)
                raise UserError(f"{out} was not written: " + "; ".join(filter(None, found)))
    finally:
        lock.release()
    return out


def _layer_bytes(reader: CheckpointReader) -> int:
    """The bytes of the weights and moments that the Pseudo model holds for its largest layer."""
    sharing, sizes = sharing_of(reader), dict.fromkeys(range(reader.state[STATE]["sharing"]["num_layers"]), 0)
    for place in reader.ranges():
        for layer in sizes:
            prefix = f".layers.{layer}."
            if any(prefix in name for name in sharing.real_names(place.name)):
                sizes[layer] += place.numel * reader.element_size(place)
    return max(sizes.values())


def _pieces(reader: CheckpointReader, reset: bool, rank: int, world_size: int) -> Iterator[Fragment]:
    """This rank's share of the Real model's state, read piece by piece."""
    sharing, limit = sharing_of(reader), max(1, _layer_bytes(reader) // _PIECES_PER_LAYER)
    number = 0
    for place in reader.ranges():
        numel = max(1, limit // reader.element_size(place))
        for begin in range(place.offset, place.offset + place.numel, numel):
            number += 1
            if number % world_size == rank:
                end = min(begin + numel, place.offset + place.numel)
                yield from _copies(reader.read_range(place, begin, end), place, begin, sharing, reset)


def _copies(data: Tensor, place: Range, begin: int, sharing: Sharing, reset: bool) -> Iterator[Fragment]:
    for name in sharing.real_names(place.name):
        copy = data.new_zeros(data.shape) if reset and place.kind != WEIGHT else data.clone()
        yield Fragment(name, place.kind, begin, copy, place.shape)
