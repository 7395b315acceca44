"""A folder of the user's own images with captions, in the layout of Hugging Face's imagefolder.

It is not read by Hugging Face Datasets: there one bad line of metadata or one missing image ends the reading, and
links may lead out of the folder.
"""

import csv
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import (
    PICTURE_SUFFIXES,
    LocalSource,
    entry_of,
    group_of_row,
    is_hidden,
    kind_of,
    label_of_row,
    note_unread_columns,
    own_splits,
    picture_kind,
    require_column,
    split_folders,
    split_of_folder,
    split_of_row,
    text_problem,
    unreadable_reason,
    written,
)
from m6.errors import UserError

METADATA = ("metadata.jsonl", "metadata.csv")
_END_OF_CSV = "\uffffend of the file\uffff"  # a line that no file has
MAX_LINE_BYTES = 8 << 20  # of JSONL; a longer line is skipped in pieces
MAX_CAPTION_BYTES = 8 << 20  # of a caption's .txt file


class PictureFolder(LocalSource):
    """A folder of images with captions.

    Captions are in the text column of ``metadata.jsonl`` or ``metadata.csv``, where the column ``file_name`` is a path
    relative to the metadata; or in a ``.txt`` file next to each image; or they are the names of the images'
    folders. If all top folders are named after splits, such as ``train`` and ``val``, they are splits.

    Raises:
        UserError: the folder has no images or no captions.
    """

    def __init__(self, name: str, folder: Path, options: SourceOptions) -> None:
        files = [file for file in sorted(folder.rglob("*")) if not is_hidden(file.relative_to(folder))]
        self._pictures = [file for file in files if file.suffix.lower() in PICTURE_SUFFIXES]
        self._captions = captions_of(self._pictures, files)
        readable = [file for file in files if unreadable_reason(folder, file) is None]
        captions = sorted({file for found in self._captions.values() for file in found} & set(readable))
        self._metadata = [file for metadata_name in METADATA for file in readable if file.name == metadata_name]
        relative = [picture.relative_to(folder) for picture in self._pictures]
        self._splits = split_folders(name, relative)
        depth = 2 if self._splits else 1
        self._classes = not (self._metadata or captions) and all(len(path.parts) > depth for path in relative)
        if not self._pictures or not (captions or self._metadata or self._classes):
            raise UserError(
                f"{folder}: expected pictures with metadata.jsonl, metadata.csv, .txt files beside them or a folder "
                "for each class; or .parquet, .jsonl, .csv, .tar, .txt or .md files"
            )
        # The checksum covers only readable files: opening a named pipe or a device could block forever.
        pictures = [file for file in self._pictures if unreadable_reason(folder, file) is None]
        if not self._metadata:  # no columns, so no questions
            options = dataclasses.replace(options, question_column=None)
        super().__init__(name, folder, [*pictures, *(self._metadata or captions)], options)
        self.own_splits, self.kind = own_splits(options, self._splits.values()), picture_kind(options)
        if self._metadata:
            self.columns = {
                role: column for role, column in options.columns().items() if role not in ("image", "context")
            }

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the metadata files, then one row for each other image."""
        named: set[Path] = set()
        for metadata in self._metadata:
            yield from self._metadata_rows(metadata, named)
        for picture in self._pictures:
            if picture in named:
                continue
            file_name = picture.relative_to(self._folder).as_posix()
            if self._metadata:
                yield self._bad(file_name, "not in the metadata")
            elif self._classes:
                yield self._row(file_name, picture.parent.name, {})
            else:
                text, problem = self._caption(self._captions[picture])
                problem = unreadable_reason(self._folder, picture) or problem
                yield self._row(file_name, text, {}) if problem is None else self._bad(file_name, problem)

    def _caption(self, files: list[Path]) -> tuple[str, str | None]:
        """The text of a picture's caption file, and the reason if there is none."""
        if len(files) > 1:
            return "", "two captions, such as NAME.txt and NAME.TXT"
        if not files or unreadable_reason(self._folder, file := files[0]):
            return "", "no caption"
        if file.stat().st_size > MAX_CAPTION_BYTES:
            return "", f"caption larger than {MAX_CAPTION_BYTES >> 20} MiB"
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            return "", "not UTF-8"
        return text, None if text.strip() else "no caption"

    def _metadata_rows(self, metadata: Path, named: set[Path]) -> Iterator[Row]:
        parent = metadata.parent.relative_to(self._folder)
        checked = False
        for number, entry in file_entries(metadata):
            if isinstance(entry, str):
                yield self._bad(f"{(parent / metadata.name).as_posix()}:{number}", entry)
                continue
            if not checked:
                checked = True
                for role, column in (("", "file_name"), *self.columns.items()):
                    require_column(column, entry, metadata, role)
                note_unread_columns(self.name, entry, ("file_name", *self.columns.values()))
            value = entry.get("file_name")
            if not isinstance(value, str):
                line = f"{(parent / metadata.name).as_posix()}:{number}"
                yield self._bad(line, f"the file_name is {kind_of(value)}")
                continue
            file_name = (parent / value).as_posix()
            # An image may have several questions or captions.
            is_again = self._options.question_column or self._folder / file_name in named
            named.add(self._folder / file_name)
            identity = f"{file_name}:{number}" if is_again else file_name
            text: Any = entry.get(self._options.written_column)
            problem = text_problem(text, self._options)
            yield self._row(file_name, text, entry, identity) if problem is None else self._bad(identity, problem)

    def _row(self, file_name: str, text: str, entry: dict[str, Any], identity: str | None = None) -> Row:
        identity = identity or file_name
        picture = self._folder / file_name
        split, problem = split_of_row(entry, self._options)
        problem = unreadable_reason(self._folder, picture) or problem
        if problem is not None:
            return self._bad(identity, problem)
        field = written(text, self._options)
        answer = picture.parent.name if self._classes else label_of_row(entry, self._options)
        group = group_of_row(entry, self._options)
        split = split or split_of_folder(Path(file_name), self._splits)
        image = picture.read_bytes()
        return Row(f"{self.name}/{identity}", group, image=image, answer=answer, split=split, **field)

    def _bad(self, name: str, problem: str) -> Row:
        return Row(f"{self.name}/{name}", None, problem=problem)


def captions_of(pictures: Iterable[Path], files: Iterable[Path]) -> dict[Path, list[Path]]:
    """Returns the .txt files beside each picture among ``files``; the suffix may be in capitals."""
    texts: dict[Path, list[Path]] = {}
    for file in files:
        if file.suffix.lower() == ".txt":
            texts.setdefault(file.with_suffix(""), []).append(file)
    return {picture: texts.get(picture.with_suffix(""), []) for picture in pictures}


def parse_object(line: bytes) -> dict[str, Any] | str:
    """Parses a JSON object, or returns the reason if there is none. A repeated key gets the value ``GIVEN_TWICE``."""
    try:
        entry = json.loads(line.decode("utf-8-sig"), object_pairs_hook=entry_of)
    except UnicodeDecodeError:
        return "not UTF-8"
    except RecursionError:
        return "JSON that is nested too deeply"
    except json.JSONDecodeError:
        return "invalid JSON"
    except ValueError:  # Python's limit, since such a number takes quadratic time
        return "a number of too many digits"
    return entry if isinstance(entry, dict) else f"JSON that is no object but {kind_of(entry)}"


def file_entries(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields the rows of a JSONL or CSV file, or the reason for an unreadable one, numbered from 1.

    UserError if a CSV file is not valid or not UTF-8.
    """
    if file.suffix.lower() == ".csv":
        yield from enumerate(_csv_entries(file), start=1)
        return
    with file.open("rb") as lines:
        yield from json_entries(lines)


def json_entries(lines: IO[bytes]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields the non-blank lines of a JSONL file: the number, and the object or the reason if there is none."""
    number = 0
    while line := lines.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := lines.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, "line too long"
        elif line.strip():
            yield number, parse_object(line)


def _csv_entries(file: Path) -> Iterator[dict[str, Any] | str]:
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        # utf-8-sig: spreadsheet programs write CSV files with a byte order mark.
        with file.open(encoding="utf-8-sig", newline="") as lines:
            # Only an open quotation takes the last line for its own: the reader itself tells nobody.
            rows = csv.reader(itertools.chain(lines, [_END_OF_CSV]))
            if (header := next(filter(None, rows))) == [_END_OF_CSV]:
                return
            for fields in rows:
                if _END_OF_CSV in fields[-1:]:
                    return
                if len(fields) > len(header):
                    yield "more fields than columns"
                elif fields:  # not a blank line
                    values = itertools.chain((value or None for value in fields), itertools.repeat(None))
                    yield entry_of(list(zip(header, values, strict=False)))
            raise csv.Error("it ends inside of quotation marks")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.object[error.start]:#04x}): save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{file} is not a CSV file that can be read: {error}") from None
    finally:
        csv.field_size_limit(limit)
