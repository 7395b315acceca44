"""Finds the checkpoints of a run: complete, incomplete and corrupt ones."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from m6.checkpoints.format import MANIFEST, CheckpointReader, no_progress, step_folder, step_of
from m6.errors import StorageError, UserError
from m6.files import read_note, reading
from m6.runs.directory import LAST_CHECKPOINT
from m6.runs.processes import on_main_rank

# NFS may show a folder as it was a minute ago.
_VISIBLE_AFTER_S, _POLL_S = 90.0, 1.0


def complete_checkpoints(root: Path) -> list[Path]:
    """The folders of the complete checkpoints in ``root``, oldest first."""
    if not root.is_dir():
        return []
    steps = {path: step_of(path) for path in root.iterdir() if (path / MANIFEST).is_file()}
    return [path for step, path in sorted((step, path) for path, step in steps.items() if step is not None)]


def lost_newest(root: Path, step: int, explained: bool = False) -> str | None:
    """Says that a run in ``root`` once completed a later checkpoint than that of ``step``; None if it did not.

    Without its manifest, a checkpoint looks like one that a killed attempt began. If the note of the last checkpoint is
    damaged, nobody knows, which is also said.

    Args:
        explained: whether the problems of later checkpoints have been told.
    """
    file = root.parent / LAST_CHECKPOINT
    if not file.exists():
        return None
    last = step_of(Path(name := read_note(file)))
    if last is None:
        return (
            f"{file}: corrupt: it holds {name!r:.80}, expected a name such as {step_folder(step)}; the run goes on "
            f"from {root / step_folder(step)}, the newest checkpoint, and whether there was a later one is not known"
        )
    if last <= step or explained:
        return None
    return f"{root.parent} was saved as {name}, but {root} holds no such checkpoint; it goes on from step {step}"


def remove_checkpoint(folder: Path) -> None:
    """Removes an obsolete checkpoint. If a file cannot be removed, the rest stays, with a warning.

    NFS, for example, keeps an open file of a process, and with it the folder.
    """
    try:
        (folder / MANIFEST).unlink(missing_ok=True)  # first: after a crash in rmtree the rest must not look complete
        shutil.rmtree(folder)
    except OSError as error:
        print(f"warning: {folder} cannot be removed: {error.strerror or error}", file=sys.stderr, flush=True)


def remove_half_written(root: Path, next_folder: Path) -> None:
    """Removes the incomplete checkpoints of killed attempts.

    Raises:
        OSError: ``next_folder`` cannot be removed. It is written next, and its old records would look like new ones.
    """
    if root.is_dir():
        for folder in root.iterdir():
            if step_of(folder) is not None and not (folder / MANIFEST).exists():
                if folder == next_folder:
                    shutil.rmtree(folder)
                else:
                    remove_checkpoint(folder)


def open_newest(root: Path, on_file: Callable[[], object] = no_progress) -> tuple[CheckpointReader | None, list[str]]:
    """Opens the newest checkpoint in ``root`` with correct checksums. Every rank calls this function.

    A corrupt checkpoint is renamed, never deleted, and the one before it is tried. If a rank cannot read a checkpoint,
    it stays as it is: on another node, or later, it may be whole.

    Args:
        root: a run's checkpoints.
        on_file: called for each file after this rank has compared it with its checksum.

    Returns:
        the checkpoint, or None if there is none; and one line for each problem.

    Raises:
        StorageError: ``root`` cannot be read, or a corrupt checkpoint cannot be renamed; or see ``open_together``.
    """
    problems: list[str] = []
    while (folder := _newest_on_main_rank(root)) is not None:
        reader, folder_problems = open_together(folder, on_file)
        if reader is not None:
            return reader, problems
        problems.extend(folder_problems)
        on_main_rank(partial(_set_aside, folder))
    return None, problems


def open_needed(root: Path, on_file: Callable[[], object] = no_progress) -> CheckpointReader:
    """Opens the newest checkpoint in ``root`` for a command that needs one. Every rank calls this function.

    Args:
        root, on_file: as in ``open_newest``.

    Raises:
        UserError: there is none, or it is damaged.
        StorageError: ``root`` cannot be read; or see ``open_together``.
    """
    folder = _newest_on_main_rank(root)
    if folder is None:
        raise UserError(f"{root} holds no complete checkpoint")
    reader, problems = open_together(folder, on_file)
    if reader is None:
        raise UserError("; ".join(problems))
    return reader


def _newest_on_main_rank(root: Path) -> Path | None:
    """The newest complete checkpoint in ``root``, as seen by the main rank. Every rank calls this function.

    If each rank looked for itself, ranks could resume from different steps: a node may see an old state of a shared
    folder.
    """

    def newest() -> str | None:
        with reading(root):
            folders = complete_checkpoints(root)
        return folders[-1].name if folders else None

    name = on_main_rank(newest)
    return None if name is None else root / name


def open_together(
    folder: Path, on_file: Callable[[], object] = no_progress
) -> tuple[CheckpointReader | None, list[str]]:
    """Opens a checkpoint; every rank checks the checksums of a part of the files.

    Returns:
        the reader, and the problems of all ranks; if there is a problem, the reader is None on every rank.

    Raises:
        StorageError: on every rank, if one of them does not see the same files as the main rank, or cannot read one.
    """
    reader: CheckpointReader | None = None
    unread, problems = _wait_for_files(folder), list[str]()
    if unread is None:
        try:
            reader = CheckpointReader(folder)
            problems = reader.verify(dist.get_rank(), dist.get_world_size(), on_file)
        except StorageError as error:  # of this node: the checkpoint may be whole
            unread = f"rank {dist.get_rank()}: {error}"
        except UserError as error:
            problems = [str(error)]
    outcomes: list[tuple[str | None, list[str], str | None]] = [(None, [], None)] * dist.get_world_size()
    dist.all_gather_object(outcomes, (unread, problems, reader and reader.sha256))
    for reason, _, _ in outcomes:
        if reason is not None:
            raise StorageError(reason)
    if len({sha256 for _, _, sha256 in outcomes if sha256 is not None}) > 1:
        raise StorageError(f"{folder}: ranks read different files {MANIFEST}: a node sees the folder as it was before")
    # Without duplicates: every rank reports a damaged manifest.
    problems = list(dict.fromkeys(problem for _, part, _ in outcomes for problem in part))
    return (None if problems else reader), problems


def _wait_for_files(folder: Path) -> str | None:
    """Waits until this rank sees all files of ``folder`` seen by the main rank; says which one stays hidden."""
    names: list[set[str] | None] = [_names(folder) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    deadline = time.monotonic() + _VISIBLE_AFTER_S
    while (hidden := (names[0] or set()) - _names(folder)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if not hidden:
        return None
    return (
        f"{folder}: after {_VISIBLE_AFTER_S:.0f} s rank {dist.get_rank()} does not see {min(hidden)}, which rank 0 "
        "sees; is the folder on a file system that all nodes share?"
    )


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:  # missing, or hidden from this node: an error of reading its files will say so
        return set()


def _set_aside(folder: Path) -> None:
    name = f"corrupt_{folder.name}"
    # The largest number plus one, not the count: a person may have removed or copied one of them.
    others = (re.fullmatch(rf"{name}(?:_(\d+))?", path.name) for path in folder.parent.glob(f"{name}*"))
    numbers = [int(found[1] or 0) for found in others if found]
    folder.rename(folder.with_name(f"{name}_{max(numbers) + 1}" if numbers else name))


def check_tokenizer_unchanged(root: Path, fingerprint: str) -> None:
    """Raises UserError if the newest checkpoint in ``root`` was trained with another tokenizer; writes nothing."""
    for folder in complete_checkpoints(root)[-1:]:
        try:
            state = CheckpointReader(folder).state
        except UserError:
            return  # damaged or unreadable: ``open_newest`` reports it
        if state["tokenizer"] != fingerprint:
            raise UserError(
                f"m6.data.tokenizer is not the one that {folder} was trained with (fingerprint {fingerprint[:12]} "
                f"instead of {state['tokenizer'][:12]}); restore it, or choose another --run-dir"
            )
