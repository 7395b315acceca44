"""Rows of one entry of a table: a picture with its caption, or the passages of a text."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from m6.data.manifest import Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import (
    group_of_row,
    group_of_text,
    label_of_row,
    split_of_row,
    unreadable_reason,
    written,
)
from m6.data.sources.text import passages
from m6.files import reading


def picture_row(
    entry: Mapping[str, Any],
    column: str,
    identity: str,
    split: Split | None,
    folder: Path | None,
    options: SourceOptions,
) -> Row:
    """Returns the row of one entry of a table of pictures, or one with the problem.

    Args:
        entry: the values of the columns.
        column: the column of pictures: bytes, Hugging Face's ``{"bytes", "path"}``, or a path.
        identity: id of the row.
        split: the split of the whole table, if it is one.
        folder: folder that paths are relative to; None: paths are not followed.
        options: the other columns.
    """
    split, problem = split_or_problem(entry, options.written_column, split, options)
    if problem is not None:
        return Row(identity, identity, problem=problem)
    image, problem = _picture_or_problem(entry.get(column), folder)
    group, label = group_of_row(entry, options), label_of_row(entry, options)
    field = written(entry[options.written_column], options)
    return Row(identity, group, image=image, answer=label, split=split, problem=problem, **field)


def text_rows(entry: Mapping[str, Any], identity: str, split: Split | None, options: SourceOptions) -> Iterator[Row]:
    """Yields the passages of one entry of a table of texts, or one row with the problem.

    Args:
        entry: the values of the columns.
        identity: id of the entry; the ids of its passages begin with it.
        split: the split of the whole table, if it is one.
        options: columns, and the length of passages.
    """
    split, problem = split_or_problem(entry, options.text_column, split, options)
    if problem is not None:
        yield Row(identity, identity, problem=problem)
        return
    text = entry[options.text_column]
    cut = list(passages(text, options.passage_chars))
    if not cut:
        yield Row(identity, identity, problem="empty text")
    group = group_of_row(entry, options) or group_of_text(text)
    for index, passage in enumerate(cut):
        yield Row(f"{identity}/{index}", group, passage, split=split)


def split_or_problem(
    entry: Mapping[str, Any], column: str, split: Split | None, options: SourceOptions
) -> tuple[Split | None, str | None]:
    """Returns the split of an entry, and why it cannot be used: its ``column`` has no text, or an unknown split."""
    text = entry.get(column)
    if not isinstance(text, str):
        return None, f"the text is {'null' if text is None else type(text).__name__}"
    named, problem = split_of_row(entry, options)
    return named or split, problem


def _picture_or_problem(value: object, folder: Path | None) -> tuple[bytes | None, str | None]:
    """The contents of a picture file, or why there is none."""
    # A data set of the Hub (no folder) must not name local files.
    picture = None if folder is None else named_file(value, folder)
    if picture is not None and folder is not None:
        problem = unreadable_reason(folder, picture)
        with reading(picture):
            content = None if problem else picture.read_bytes()
        return content, problem or (None if content else "missing image")
    if isinstance(value, dict):
        value = value.get("bytes")
    return (value, None) if isinstance(value, bytes) and value else (None, "missing image")


def named_file(value: object, folder: Path) -> Path | None:
    """Returns the file that the cell of a picture names; None if the cell holds the picture itself, or nothing."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return folder / value if isinstance(value, str) else None
