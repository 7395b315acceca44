"""Makes rows of table entries, and of the user's own .txt and .md files.

An entry is an image with its caption, or a text to cut into passages.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from m6.data.manifest import SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import (
    LocalSource,
    group_of_row,
    group_of_text,
    kind_of,
    label_of_row,
    split_of_row,
    text_problem,
    unreadable_reason,
    written,
)
from m6.data.sources.split_names import split_folders, split_of_folder
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
    """Returns the row of one entry of a table of images. A bad entry gives a row with the problem.

    Args:
        entry: the values of the columns.
        column: the column of images: bytes, Hugging Face's ``{"bytes", "path"}``, or a path.
        identity: id of the row.
        split: the split of the whole table, if it is one.
        folder: base folder of paths; None: paths are not followed.
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
    """Yields the passages of one entry of a table of texts. A bad entry gives one row with the problem.

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
    """Yields the passages of a text, or one bad row if it is empty. Without a group, equal texts form a group."""
    group, number = group or group_of_text(text), 0
    for number, passage in enumerate(passages(text, options.passage_chars), start=1):
        yield Row(f"{identity}/{number - 1}", group, passage, split=split)
    if not number:
        yield Row(identity, identity, problem="empty text")


def split_or_problem(
    entry: Mapping[str, Any], column: str, split: Split | None, options: SourceOptions
) -> tuple[Split | None, str | None]:
    """Returns the split of an entry, and the reason if it is unusable: no text in ``column``, or an unknown split."""
    named, problem = split_of_row(entry, options)
    return named or split, text_problem(entry.get(column), options) or problem


def _picture_or_problem(value: object, folder: Path | None) -> tuple[bytes | None, str | None]:
    """The contents of an image file, or the reason if there are none."""
    # Rows of a Hub data set (no folder) must not name local files.
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
    """Returns the file named in an image cell; None if the cell holds the image itself, or nothing."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return folder / value if isinstance(value, str) and value else None


MAX_DOCUMENT_BYTES = 256 << 20


class Documents(LocalSource):
    """Plain text or Markdown files. Each file is a document, cut into passages.

    Args:
        name: name in the manifest.
        folder: folder of the files; ids are relative to it.
        files: the files.
        options: the licence, and the length of passages.
        splits: splits of the files; None: by the names of the top folders.
    """

    FORMATS: ClassVar[tuple[str, ...]] = (".txt", ".md")
    kind: SourceKind = "text"

    def __init__(
        self,
        name: str,
        folder: Path,
        files: list[Path],
        options: SourceOptions,
        splits: Mapping[Path, Split | None] | None = None,
    ) -> None:
        super().__init__(name, folder, files, options)
        relative = {file: file.relative_to(folder) for file in files}
        self._names = {file: f"{name}/{part.as_posix()}" for file, part in relative.items()}
        if splits is None:
            folders = split_folders(name, relative.values())
            splits = {file: split_of_folder(part, folders) for file, part in relative.items()}
        self._splits = splits
        self.own_splits = frozenset(split for split in self._splits.values() if split)

    def rows(self) -> Iterator[Row]:
        """Yields the passages of each file; equal files are in one split."""
        for file in self._paths:
            identity, split = self._names[file], self._splits[file]
            if file.stat().st_size > MAX_DOCUMENT_BYTES:
                yield Row(identity, identity, problem=f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
                continue
            try:
                with reading(file):
                    text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                yield Row(identity, identity, problem="not UTF-8")
                continue
            yield from passage_rows(text, identity, None, split, self._options)
