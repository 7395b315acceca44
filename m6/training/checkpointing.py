"""Saves and restores checkpoints of a run; the training waits only for a copy to host memory."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from m6.architecture.names import is_adapter
from m6.checkpoints.adapters import BaseWeights
from m6.checkpoints.discovery import complete_checkpoints, remove_checkpoint, remove_half_written
from m6.checkpoints.format import (
    MANIFEST,
    WEIGHT,
    CheckpointReader,
    Fragment,
    WeightReader,
    no_progress,
    step_folder,
    write_manifest,
    write_shards,
)
from m6.config.run import RunConfig
from m6.data.settings import DataSettings
from m6.errors import StorageError, UserError
from m6.files import write_text
from m6.renamed import RENAMED
from m6.runs.directory import LAST_CHECKPOINT, PROGRESS
from m6.runs.processes import COLLECTIVE_TIMEOUT_S, Runtime, on_main_rank, raise_together
from m6.training.engine.engine import Engine

_POLL_S = 0.05
# Interval of the life signs of a run during a wait for a write.
_ALIVE_S = 10.0
# How long rank 0 waits for records. Meanwhile other ranks may wait for rank 0 in a collective: it gives up before them.
_RECORDS_S = 0.75 * COLLECTIVE_TIMEOUT_S
# How long a failed attempt waits for the records of other ranks.
_GRACE_S = 30.0


class Checkpointer:
    """Writes sharded checkpoints into ``RUN/checkpoints`` and keeps the last few.

    ``save`` copies this rank's share to host memory and returns; a thread writes it. The thread of rank 0 waits for
    the records of all ranks on the shared file system. It then writes the manifest and the file ``latest``, and
    removes old checkpoints. An error in a thread is raised by the next ``save``, ``wait`` or ``check``.

    Args:
        root: RUN/checkpoints.
        keep_last: number of complete checkpoints to keep.
        async_save: False: ``save`` writes without a thread, with the copies of one file at a time in host memory.
        timeout_s: how long rank 0 waits for the record of another rank, in seconds. Other ranks may wait as long for
            rank 0 in a collective, so it is shorter than the time-out of collectives.
    """

    def __init__(
        self, root: Path, runtime: Runtime, keep_last: int, async_save: bool, timeout_s: float = _RECORDS_S
    ) -> None:
        self.root, self.runtime, self.keep_last = root, runtime, keep_last
        self._async, self._timeout_s = async_save, timeout_s
        self._thread: threading.Thread | None = None
        self._deadline = 0.0
        self._give_up_at = math.inf  # set when the attempt is over
        self._blocked_since = math.inf if async_save else -math.inf  # when the training began to wait for the thread
        self._failure: BaseException | None = None

    def save(self, engine: Engine, step: int, state: dict[str, Any]) -> float:
        """Saves the state after ``step`` optimizer steps. Every rank calls this method.

        Args:
            state: entries of the manifest's state, as JSON; the engine's counters are added.

        Returns:
            the stall of the training in seconds.

        Raises:
            StorageError: this checkpoint or the previous one cannot be written.
        """
        begin = time.perf_counter()
        self.wait()
        folder = self.folder(step)

        def make_room() -> bool:
            try:
                remove_half_written(self.root, folder)
                folder.mkdir(parents=True, exist_ok=True)
                return (folder / MANIFEST).exists()
            except OSError as error:
                raise StorageError(f"{folder} cannot be written: {error}") from None

        # No rank writes before the main rank has removed old records. A run stopped right after its resume has nothing
        # new to save. The main rank decides this: another node may not see the manifest yet.
        if on_main_rank(make_room):
            return time.perf_counter() - begin
        # One after the other: offloaded experts are read into new tensors, and memory cannot hold all of them at once.
        fragments = chain(engine.fragments(), engine.residual_fragments())
        copies = (_copy_to_host(fragment.owned()) for fragment in fragments)
        state = {**state, "step": step, **engine.counters()}
        self._deadline = time.monotonic() + self._timeout_s
        if self._async:
            # Not a daemon: a process must finish its checkpoint before it exits.
            self._thread = threading.Thread(target=self._run, args=(folder, list(copies), state), name="checkpoint")
            self._thread.start()
        else:
            with self._showing_life():
                self._run(folder, copies, state)
                deque(copies, maxlen=0)  # fragments may contain collectives: a rank goes on even if it cannot write
            self._check_together()
        return time.perf_counter() - begin

    def folder(self, step: int) -> Path:
        """The folder of the checkpoint after ``step`` optimizer steps."""
        return self.root / step_folder(step)

    def wait(self) -> None:
        """Waits until the current checkpoint is on disk. Every rank calls this method.

        Raises:
            StorageError: on every rank, if any rank could not write its part.
        """
        if self._thread is not None:
            self._blocked_since = time.monotonic()
            with self._showing_life():
                self._thread.join()
            self._thread, self._blocked_since = None, math.inf
        self._check_together()

    def close(self) -> None:
        """Ends the thread, because it must not write when another attempt may begin.

        After a failure the records of other ranks may never come. The thread waits for them at most 30 s more.
        """
        if self._thread is not None:
            self._give_up_at = time.monotonic() + _GRACE_S
            self._thread.join()

    def check(self) -> None:
        """Raises StorageError if this rank could not write a checkpoint: the next checkpoints would fail too."""
        if (failure := self._take_failure()) is not None:
            raise failure

    def _check_together(self) -> None:
        failure = self._take_failure()
        if failure is not None and self.runtime.world_size == 1:
            raise failure  # with its cause
        raise_together(failure)

    def _take_failure(self) -> StorageError | None:
        if self._failure is None:
            return None
        failure = StorageError(f"{self.root}: a checkpoint could not be written: {self._failure}")
        failure.__cause__, self._failure = self._failure, None
        return failure

    @contextlib.contextmanager
    def _showing_life(self) -> Iterator[None]:
        """A context in which rank 0 keeps touching RUN/progress, until the deadline of the write.

        The watchdog of a job ends a run with an old file, and a wait for one or two writes may be longer than any step.
        """
        over = threading.Event()

        def touch() -> None:
            while not over.is_set():
                if time.monotonic() < self._deadline:  # the deadline moves when rank 0 has written its own part
                    with contextlib.suppress(OSError):  # the write itself reports a failing disk
                        os.utime(self.root.parent / PROGRESS)
                over.wait(_ALIVE_S)

        if self.runtime.is_main:
            threading.Thread(target=touch, name="life", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _run(self, folder: Path, pieces: Iterable[Fragment], state: dict[str, Any]) -> None:
        try:
            self._write(folder, pieces, state)
        except Exception as error:  # the training thread raises it
            self._failure = error

    def _write(self, folder: Path, pieces: Iterable[Fragment], state: dict[str, Any]) -> None:
        write_shards(folder, self.runtime.rank, pieces)
        if not self.runtime.is_main:
            return
        # The others have the same time again after this rank's own part, because this part may have been slower.
        end = time.monotonic()
        self._deadline, ahead = end + self._timeout_s, self._ahead_s(folder)
        # Not a barrier: a collective in this thread would interleave with collectives of the training thread.
        for rank in range(self.runtime.world_size):
            while not self._record(folder, rank).exists():
                # After its own write, a rank waits in a collective as soon as the training of this rank waits.
                waits_since = min(end, max(end - ahead, self._blocked_since))
                if time.monotonic() > min(waits_since + self._timeout_s, self._give_up_at):
                    raise TimeoutError(f"rank {rank} wrote no record into {folder} in time")
                time.sleep(_POLL_S)
        write_manifest(folder, self.runtime.world_size, state)
        write_text(self.root / "latest", folder.name + "\n")
        write_text(self.root.parent / LAST_CHECKPOINT, folder.name + "\n")
        for old in complete_checkpoints(self.root)[: -self.keep_last]:
            remove_checkpoint(old)

    @staticmethod
    def _record(folder: Path, rank: int) -> Path:
        return folder / f"rank_{rank:05d}.json"

    def _ahead_s(self, folder: Path) -> float:
        """Returns the lead of the first rank over this rank, in seconds of the file system's clock."""
        records = (self._record(folder, rank) for rank in range(self.runtime.world_size))
        times = [record.stat().st_mtime for record in records if record.exists()]
        return max(0.0, self._record(folder, self.runtime.rank).stat().st_mtime - min(times))


# Old checkpoints lack this entry, because it had only one value when they were written.
_SUMS_OF_OLD_STATES = {"m6.training.overlap_micro_batches": 1}


def check_same_sums(config: RunConfig, state: dict[str, Any]) -> None:
    """Raises UserError if ``"deterministic": "any_world"`` cannot continue from a checkpoint with this state."""
    before, now = state.get("any_world"), config.sums_depend_on
    if before is None or now is None:
        return
    before = {RENAMED.get(name, name): value for name, value in before.items()}
    for name, value in now.items():
        had = before.get(name, _SUMS_OF_OLD_STATES.get(name))
        if value != had:
            own, other = json.dumps(value), json.dumps(had)
            raise UserError(
                f'{name} {own}: the steps so far had {other}, and "deterministic": "any_world" adds up other sums with '
                f"{own}; use {other}"
            )


def check_same_tokenizers(
    settings: DataSettings, identities: dict[str, str | None], state: dict[str, Any], run: Path
) -> None:
    """Raises UserError if a checkpoint with this state in the folder ``run`` belongs to other tokenizers."""
    for name, identity in identities.items():
        if state.get(name) != identity:
            raise UserError(
                f"{getattr(settings, name)}: the {name.replace('_', ' ')} differs from that of the checkpoint in {run}"
            )


def restore(engine: Engine, reader: CheckpointReader, on_read: Callable[[], object] = no_progress) -> None:
    """Loads weights, moments and counters into the engine; the checkpoint may have any layout.

    Args:
        on_read: called after each fragment.

    Raises:
        UserError: the checkpoint belongs to another model or optimizer.
    """
    engine.expect(reader.state, str(reader.folder))
    _fill(engine, reader, engine.fragments(to_fill=True), on_read)
    engine.load_residuals(reader)
    engine.load_counters(reader.state, reader.state["step"])


def restore_weights(engine: Engine, reader: WeightReader, on_read: Callable[[], object] = no_progress) -> None:
    """Loads only the weights, to start a run from another run or an exported model. Adapters keep their values.

    Args:
        on_read: called after each fragment.

    Raises:
        UserError: the weights belong to another model.
    """
    fragments = engine.fragments(to_fill=True)
    targets = (each for each in fragments if each.kind == WEIGHT and not is_adapter(each.name))
    _fill(engine, BaseWeights(reader, engine.tensor_names), targets, on_read)


def _fill(
    engine: Engine, reader: WeightReader, targets: Iterable[Fragment], on_read: Callable[[], object] = no_progress
) -> None:
    names = engine.tensor_names
    for name in reader.names(WEIGHT):
        if name not in names:
            raise UserError(
                f"{reader.folder}: holds {name}, which this model does not have: it belongs to another model"
            )
    failure: Exception | None = None
    with torch.no_grad():
        # Fragments and ``publish_weights`` may contain collectives: after a failed read a rank goes on without reading.
        for fragment in targets:
            if failure is None:
                try:
                    _read(fragment, reader)
                except (UserError, OSError) as error:
                    failure = error
            on_read()
    raise_together(failure)
    engine.publish_weights()


def _read(fragment: Fragment, reader: WeightReader) -> None:
    stored = reader.shapes.get((fragment.name, fragment.kind))
    if stored != fragment.shape:
        mismatch = f"this model has {fragment.shape}: the checkpoint belongs to another model or optimizer"
        if stored is None:
            raise UserError(f"{reader.folder}: holds no {fragment.kind} of {fragment.name}, {mismatch}")
        raise UserError(f"{reader.folder}: {fragment.kind} of {fragment.name} has shape {stored}, {mismatch}")
    reader.read_into(fragment.name, fragment.kind, fragment.offset, fragment.data)


def _copy_to_host(fragment: Fragment) -> Fragment:
    host = torch.empty(fragment.data.shape, dtype=fragment.data.dtype, device="cpu")
    host.copy_(fragment.data.detach())
    return replace(fragment, data=host)
