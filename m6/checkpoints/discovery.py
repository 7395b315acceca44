"""Which checkpoints a run has: complete, half-written and corrupt ones."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch.distributed as dist

from m6.checkpoints.format import MANIFEST, CheckpointReader
from m6.errors import UserError

_FOLDER = re.compile(r"step_(\d{8})")


def complete_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints below ``root``, oldest first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(folders)


def remove_half_written(root: Path) -> None:
    """Removes what an attempt that was killed did not complete: records in it would pass for those of this one."""
    if root.is_dir():
        for folder in root.iterdir():
            if _FOLDER.fullmatch(folder.name) and not (folder / MANIFEST).exists():
                shutil.rmtree(folder)


def open_newest(root: Path) -> tuple[CheckpointReader | None, list[str]]:
    """Opens the newest checkpoint below ``root`` whose files are whole.

    A corrupt one is set aside under another name, never deleted, and the one before it is taken.

    Returns:
        the checkpoint (None: there is none), and one line per problem that was met.
    """
    problems: list[str] = []
    for folder in reversed(complete_checkpoints(root)):
        reader, found = open_together(folder)
        if reader is not None:
            return reader, problems
        problems.extend(found)
        if dist.get_rank() == 0:
            _set_aside(folder)
        dist.barrier()
    return None, problems


def open_together(folder: Path) -> tuple[CheckpointReader | None, list[str]]:
    """Opens a checkpoint of which every rank checks a share of the files.

    Returns:
        the reader, and what any rank found wrong; with a problem there is no reader on any rank.
    """
    reader: CheckpointReader | None = None
    try:
        reader = CheckpointReader(folder)
        own = reader.verify(dist.get_rank(), dist.get_world_size())
    except UserError as error:
        own = [str(error)]
    found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    problems = list(dict.fromkeys(problem for part in found for problem in part))  # all ranks find a bad manifest
    return (None if problems else reader), problems


def _set_aside(folder: Path) -> None:
    name = f"corrupt_{folder.name}"
    taken = len(list(folder.parent.glob(f"{name}*")))
    folder.rename(folder.with_name(f"{name}_{taken}" if taken else name))


def check_tokenizer_unchanged(root: Path, fingerprint: str) -> None:
    """Raises if the newest checkpoint below ``root`` was trained with another tokenizer; writes nothing."""
    for folder in complete_checkpoints(root)[-1:]:
        try:
            state = CheckpointReader(folder).state
        except UserError:
            return  # damaged: ``open_newest`` says so and sets it aside
        if state["tokenizer"] != fingerprint:
            raise UserError(
                f"m6.data.tokenizer is not the one that {folder} was trained with (fingerprint {fingerprint[:12]} "
                f"instead of {state['tokenizer'][:12]}); restore it, or choose another --run-dir"
            )
