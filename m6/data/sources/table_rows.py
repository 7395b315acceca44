"""Rows of one entry of a table: a picture with its caption, or the passages of a text."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from m6.data.manifest import Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import (
    group_of_row,
    group_of_text,
    kind_of,
    label_of_row,
    split_of_row,
    text_problem,
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
    yield from passage_rows(text, identity, group_of_row(entry, options), split, options)


def passage_rows(
    text: str, identity: str, group: str | None, split: Split | None, options: SourceOptions
) -> Iterator[Row]:
    """Yields the passages of a text, or one row that says that it is empty; equal texts are a group by themselves."""
    group, number = group or group_of_text(text), 0
    for number, passage in enumerate(passages(text, options.passage_chars), start=1):
        yield Row(f"{identity}/{number - 1}", group, passage, split=split)
    if not number:
        yield Row(identity, identity, problem="empty text")


def split_or_problem(
    entry: Mapping[str, Any], column: str, split: Split | None, options: SourceOptions
) -> tuple[Split | None, str | None]:
    """Returns the split of an entry, and why it cannot be used: its ``column`` has no text, or an unknown split."""
    named, problem = split_of_row(entry, options)
    return named or split, text_problem(entry.get(column), options) or problem


def _picture_or_problem(value: object, folder: Path | None) -> tuple[bytes | None, str | None]:
    """The contents of a picture file, or why there is none."""
    # A data set of the Hub (no folder) must not name local files.
    picture = None if folder is None else named_file(value, folder)
    if picture is not None and folder is not None:
        problem = unreadable_reason(folder, picture)
        with reading(picture):
            content = None if problem else picture.read_bytes()
        return content, problem
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not value:
        return None, "missing image"
    if isinstance(value, bytes):
        return value, None
    return None, "the image is a path" if isinstance(value, str) else f"the image is {kind_of(value)}"


def named_file(value: object, folder: Path) -> Path | None:
    """Returns the file that the cell of a picture names; None if the cell holds the picture itself, or nothing."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return folder / value if isinstance(value, str) and value else None
