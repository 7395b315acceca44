"""Sources of rows: built-in sources that are fetched from public packages, and the user's own data."""

import re
from collections.abc import Callable
from pathlib import Path

from m6.data.sources.base import Row, Source, SourceOptions
from m6.data.sources.easy_vqa import EasyVqaCaptions, EasyVqaCompositions, EasyVqaQuestions
from m6.data.sources.emoji import Emoji
from m6.data.sources.icon_park import IconPark
from m6.data.sources.inews import Inews
from m6.data.sources.local import PictureFolder, WebDataset, unreadable_reason
from m6.data.sources.poetry import Poetry
from m6.data.sources.reviews import Reviews
from m6.data.sources.tables import HubTable, LocalTable
from m6.data.sources.tuxpaint import TuxPaint
from m6.errors import UserError, nearest

__all__ = ["BUILT_IN", "Row", "Source", "SourceOptions", "find_source"]

# Classes, not instances: a source is made when it is used, and then reads its package.
BUILT_IN: dict[str, Callable[[SourceOptions], Source]] = {
    source.name: source
    for source in (
        Inews,
        EasyVqaCaptions,
        EasyVqaCompositions,
        EasyVqaQuestions,
        Emoji,
        IconPark,
        Poetry,
        Reviews,
        TuxPaint,
    )
}


def find_source(specifier: str, options: SourceOptions) -> Source:
    """Returns the source that a command-line argument names.

    Args:
        specifier: a built-in name, a path, or ``hf:NAME[:SPLIT]``. A prefix ``CALLED=`` before a path or ``hf:`` sets
            the name in the manifest; by default that is the last part of the path.
        options: columns, licence and cache folder.

    Raises:
        UserError: there is no such source, file or folder.
    """
    if specifier in BUILT_IN:
        return BUILT_IN[specifier](options)
    name, location = re.fullmatch(r"(?:(\w[\w-]*)=)?(.*)", specifier, re.DOTALL).groups()  # type: ignore[union-attr]
    if location.startswith("hf:"):
        dataset, _, split = location.removeprefix("hf:").partition(":")
        return HubTable(name or _name(dataset), dataset, split or "train", options)
    if location in ("", "."):
        raise UserError(f'"{specifier}" names no source: give the file or the folder by its path')
    path = Path(location)
    if not path.exists():
        hint = nearest(specifier, BUILT_IN)
        raise UserError(f'there is no source and no file or folder "{specifier}"{hint}')
    return _open_path(name or _name(path.resolve().name), path, options)


def _open_path(name: str, path: Path, options: SourceOptions) -> Source:
    if path.is_file():
        if path.suffix == ".tar":
            return WebDataset(name, [path], options)
        if path.suffix in LocalTable.FORMATS:
            return LocalTable(name, [path], options)
        raise UserError(f"{path}: expected a folder or a file .tar, {', '.join(LocalTable.FORMATS)}")
    if tars := _inside(path, ".tar"):
        return WebDataset(name, tars, options)
    # A metadata.jsonl looks like a table, but its rows name picture files: such a folder is a PictureFolder.
    tables = [file for suffix in LocalTable.FORMATS for file in _inside(path, suffix)]
    if tables and not (path / "metadata.jsonl").is_file():
        return LocalTable(name, tables, options)
    return PictureFolder(name, path, options)


def _inside(folder: Path, suffix: str) -> list[Path]:
    """Returns the files of a folder with a suffix; UserError for a link out of the folder or a pipe or device."""
    files = sorted(folder.rglob(f"*{suffix}"))
    for file in files:
        if problem := unreadable_reason(folder, file):
            raise UserError(f"{file} is not read ({problem}); remove it, or name what it points to as a source")
    return files


def _name(text: str) -> str:
    """Returns a name that is safe in file names: the last part of a path up to its first dot."""
    return re.sub(r"[^\w-]", "_", text.rsplit("/", 1)[-1].split(".")[0]) or "own"
