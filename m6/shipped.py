"""The JSON files in the package, by name, such as configurations of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from m6.errors import UserError, nearest

CONFIGS = Path(__file__).parent / "configs"
Kind = Literal["configuration", "image tokenizer", "cluster", "job", "corpus recipe"]
_FOLDERS: dict[Kind, tuple[str, ...]] = {
    "configuration": (".", "papers", "finetune", "parallel"),
    "image tokenizer": ("image_tokenizer",),
    "cluster": ("clusters",),
    "job": ("jobs",),
    "corpus recipe": ("corpus",),
}


def shipped_file(path: Path, kind: Kind) -> Path:
    """Returns ``path``, or the shipped file of this name.

    A name without folder and suffix, such as ``m6_smoke``, stands for a shipped file, unless a file ``m6_smoke``
    exists.

    Raises:
        UserError: no shipped file of this kind has the name; or ``path`` is missing and a shipped file has its name.
    """
    if path.is_file():
        return path
    shipped = {file.stem: file for folder in _FOLDERS[kind] for file in (CONFIGS / folder).glob("*.json")}
    if str(path) == path.stem:
        if path.stem not in shipped:
            if path.is_dir():
                return path
            raise UserError(f"{path}: no such file, and no shipped {kind}{nearest(path.stem, shipped)}")
        return shipped[path.stem]
    if path.stem in shipped and not path.exists():
        raise UserError(f'{path}: no such file; did you mean the shipped {kind} "{path.stem}"?')
    return path
