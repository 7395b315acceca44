"""Finds the checkpoints of a run: complete, incomplete and corrupt ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch.distributed as dist

from m6.checkpoints.format import MANIFEST, CheckpointReader
from m6.errors import UserError

_FOLDER = re.compile(r"step_(\d{8})")


def complete_checkpoints(root: Path) -> list[Path]:
    """The folders of the complete checkpoints in ``root``, oldest first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(folders)


def remove_half_written(root: Path) -> None:
    """Removes the incomplete checkpoints of killed attempts, since their records would look like new ones."""
    if root.is_dir():
        for folder in root.iterdir():
            if _FOLDER.fullmatch(folder.name) and not (folder / MANIFEST).exists():
                shutil.rmtree(folder)


def open_newest(root: Path) -> tuple[CheckpointReader | None, list[str]]:
    """Opens the newest checkpoint in ``root`` whose checksums are right. Every rank calls this function.

    A corrupt checkpoint is renamed, never deleted, and the one before it is tried.

    Returns:
        the checkpoint, or None if there is none; and one line for each problem.
    """
    problems: list[str] = []
    for folder in reversed(complete_checkpoints(root)):
        reader, folder_problems = open_together(folder)
        if reader is not None:
            return reader, problems
        problems.extend(folder_problems)
        if dist.get_rank() == 0:
            _set_aside(folder)
        dist.barrier()  # no rank lists the folder again before it is renamed
    return None, problems


def open_together(folder: Path) -> tuple[CheckpointReader | None, list[str]]:
    """Opens a checkpoint; every rank checks the checksums of a part of the files.

    Returns:
        the reader, and the problems of all ranks; if there is a problem, the reader is None on every rank.
    """
    reader: CheckpointReader | None = None
    try:
        reader = CheckpointReader(folder)
        local_problems = reader.verify(dist.get_rank(), dist.get_world_size())
    except UserError as error:
        local_problems = [str(error)]
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, local_problems)
    # Without duplicates: every rank reports a damaged manifest.
    problems = list(dict.fromkeys(problem for part in gathered for problem in part))
    return (None if problems else reader), problems


def _set_aside(folder: Path) -> None:
    name = f"corrupt_{folder.name}"
    num_existing = len(list(folder.parent.glob(f"{name}*")))
    folder.rename(folder.with_name(f"{name}_{num_existing}" if num_existing else name))


def check_tokenizer_unchanged(root: Path, fingerprint: str) -> None:
    """Raises UserError if the newest checkpoint in ``root`` was trained with another tokenizer; writes nothing."""
    for folder in complete_checkpoints(root)[-1:]:
        try:
            state = CheckpointReader(folder).state
        except UserError:
            return  # damaged: ``open_newest`` reports and renames it
        if state["tokenizer"] != fingerprint:
            raise UserError(
                f"m6.data.tokenizer is not the one that {folder} was trained with (fingerprint {fingerprint[:12]} "
                f"instead of {state['tokenizer'][:12]}); restore it, or choose another --run-dir"
            )
