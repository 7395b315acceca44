"""Saving and resuming a run: when, in which folder, without stopping the training for longer than a copy."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from m6.checkpoints.discovery import complete_checkpoints, remove_half_written
from m6.checkpoints.format import MANIFEST, CheckpointReader, WeightReader, write_manifest, write_shards
from m6.checkpoints.fragment import WEIGHT, Fragment
from m6.errors import StorageError, UserError
from m6.files import write_text
from m6.runs.directory import LAST_CHECKPOINT
from m6.runs.processes import Runtime
from m6.training.engine.engine import Engine

_POLL_S = 0.05


class Checkpointer:
    """Writes sharded checkpoints into ``RUN/checkpoints`` and keeps the last few.

    ``save`` copies this rank's share to host memory and returns; a thread writes it. Rank 0's thread waits
    for the records of all ranks on the shared file system, then writes the manifest, the pointer ``latest``,
    and removes what is older than the last ``keep_last``. A failure in a thread surfaces at the next
    ``save``, ``wait`` or ``check``.
    """

    def __init__(
        self, root: Path, runtime: Runtime, keep_last: int, async_save: bool, timeout_s: float = 1800.0
    ) -> None:
        self.root, self.runtime, self.keep_last = root, runtime, keep_last
        self._async, self._timeout_s = async_save, timeout_s
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(self, engine: Engine, step: int, state: dict[str, Any]) -> float:
        """Saves after ``step`` optimizer steps; returns the seconds for which training stood still."""
        begin = time.perf_counter()
        self.wait()
        folder = self.folder(step)
        if self.runtime.is_main:
            try:
                remove_half_written(self.root)
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError(f"{folder} cannot be written: {error}") from None
        dist.barrier()
        if (folder / MANIFEST).exists():
            return time.perf_counter() - begin
        pieces = [_copy_to_host(fragment.owned()) for fragment in engine.fragments()]
        state = {**state, "step": step, **engine.counters()}
        self._thread = threading.Thread(target=self._run, args=(folder, pieces, state), name="checkpoint")
        self._thread.start()
        if not self._async:
            self.wait()
        return time.perf_counter() - begin

    def folder(self, step: int) -> Path:
        """Where the checkpoint after ``step`` optimizer steps lies."""
        return self.root / f"step_{step:08d}"

    def wait(self) -> None:
        """Returns when the checkpoint in flight is on disk; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises what went wrong with a checkpoint, as soon as that is known: later ones would not fare better."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise StorageError(f"{self.root}: a checkpoint could not be written: {failure}") from failure

    def _run(self, folder: Path, pieces: list[Fragment], state: dict[str, Any]) -> None:
        try:
            self._write(folder, pieces, state)
        except Exception as error:  # carried to the training thread, which raises it
            self._failure = error

    def _write(self, folder: Path, pieces: list[Fragment], state: dict[str, Any]) -> None:
        write_shards(folder, self.runtime.rank, pieces)
        if not self.runtime.is_main:
            return
        deadline = time.monotonic() + self._timeout_s
        for rank in range(self.runtime.world_size):
            while not (folder / f"rank_{rank:05d}.json").exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} wrote no record into {folder} within {self._timeout_s:.0f} s")
                time.sleep(_POLL_S)
        write_manifest(folder, self.runtime.world_size, state)
        write_text(self.root / "latest", folder.name + "\n")
        write_text(self.root.parent / LAST_CHECKPOINT, folder.name + "\n")
        for old in complete_checkpoints(self.root)[: -self.keep_last]:
            (old / MANIFEST).unlink()  # first no longer complete, then gone
            shutil.rmtree(old)


def restore(engine: Engine, reader: CheckpointReader) -> None:
    """Loads weights, moments and counters into the engine, whatever layout wrote them.

    Raises:
        UserError: the checkpoint is of another model or optimizer.
    """
    _fill(engine, reader, engine.fragments())
    engine.load_counters(reader.state, reader.state["step"])


def restore_weights(engine: Engine, reader: WeightReader) -> None:
    """Loads weights alone, for a run that begins with those of another.

    Raises:
        UserError: they are of another model.
    """
    _fill(engine, reader, (fragment for fragment in engine.fragments() if fragment.kind == WEIGHT))


def _fill(engine: Engine, reader: WeightReader, wanted: Iterable[Fragment]) -> None:
    names = engine.tensor_names
    for name in reader.names(WEIGHT):
        if name not in names:
            raise UserError(f"{reader.folder}: holds {name}, which this model has not: it is of another model")
    with torch.no_grad():
        for fragment in wanted:
            stored = reader.shapes.get((fragment.name, fragment.kind))
            if stored != fragment.shape:
                of_another = f"this model has {fragment.shape}: the checkpoint is of another model or optimizer"
                if stored is None:
                    raise UserError(f"{reader.folder}: holds no {fragment.kind} of {fragment.name}, {of_another}")
                raise UserError(f"{reader.folder}: {fragment.kind} of {fragment.name} has shape {stored}, {of_another}")
            reader.read_into(fragment.name, fragment.kind, fragment.offset, fragment.data)
    engine.publish_weights()


def _copy_to_host(fragment: Fragment) -> Fragment:
    host = torch.empty(fragment.data.shape, dtype=fragment.data.dtype, device="cpu")
    host.copy_(fragment.data.detach())
    return replace(fragment, data=host)
