"""Common code of sources of the user's own files: licence, refused links, and columns."""

import errno
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

from m6 import files
from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import SourceOptions
from m6.data.sources.packages import combined_sha256
from m6.data.sources.split_names import SPLIT_WORDS
from m6.data.sources.text import text_key
from m6.errors import StorageError, UserError, nearest

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg"})
MAX_PICTURE_BYTES = 64 << 20  # a larger file or archive member is not read into memory
TOO_LARGE = f"larger than {MAX_PICTURE_BYTES >> 20} MiB"
_LISTED_COLUMNS = 8  # in a note
# Types of values convertible to a text, for columns such as labels and groups. Lists, objects and bytes are not.
_WRITTEN = (str, int, float, Decimal, date, time, timedelta, UUID)
# Errors of a missing or forbidden file. Other errors come from the storage, for example a file server.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES}


class LocalSource:
    """Base class of sources of local files.

    Args:
        name: name in the manifest.
        folder: folder of the files.
        paths: the files; the checksum of the origin covers them and their paths in the folder.
        options: options with a licence for this name.

    Attributes:
        columns: the columns read as "text", "question", "image", "label", "split" and "group"; empty for files without
            columns.

    Raises:
        UserError: no licence was given.
    """

    columns: Mapping[str, str] = MappingProxyType({})
    kind: SourceKind = "image_text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, name: str, folder: Path, paths: list[Path], options: SourceOptions) -> None:
        licence = options.licences.get(name, options.licence)
        if licence is None:
            given = f"; given: one for {', '.join(options.licences)}" if options.licences else ""
            raise UserError(
                f'--licence is missing: under which licence may "{name}" be used? It is recorded in the manifest, '
                f"for example --licence CC-BY-4.0, --licence private, or --licence {name}=private for this source alone"
                f"{given}"
            )
        self.name, self._folder, self._paths = name, folder, paths
        self._options, self._licence = options, licence

    def origin(self) -> list[Origin]:
        """Returns one origin with a checksum of all files."""
        # Relative paths count, because folders name splits, labels and captions. A copy of the folder is the same data.
        checksum = combined_sha256(
            (os.path.relpath(file, self._folder), files.sha256(file)) for file in self._files_read()
        )
        columns = dict(self.columns) or None
        return [Origin(package=self.name, version="local", licence=self._licence, sha256=checksum, columns=columns)]

    def _files_read(self) -> Iterable[Path]:
        return self._paths


def split_of_row(entry: Mapping[str, Any], options: SourceOptions) -> tuple[Split | None, str | None]:
    """Returns the split in a row's split column, and the reason if the row is unusable.

    A row is unusable if its split is unknown, or if its label or group is not convertible to a text.
    """
    problem = column_problem(entry, "label", options.label_column) or column_problem(
        entry, "group", options.group_column
    )
    if problem or options.split_column is None:
        return None, problem
    value = entry.get(options.split_column)
    split = SPLIT_WORDS.get(value.lower()) if isinstance(value, str) else None
    if not isinstance(value, str | None):
        return None, f"the split is {kind_of(value)}"
    return split, None if split else f"unknown split {str(value)[:20]!r}"


@dataclass(frozen=True)
class Unreadable:
    """Placeholder for the value of an unreadable cell; ``str`` of it is the reason."""

    reason: str

    def __str__(self) -> str:
        return self.reason


GIVEN_TWICE = Unreadable("given twice")


def entry_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the values of a row by column. The value of a repeated column is ``GIVEN_TWICE``."""
    entry = dict(pairs)
    if len(entry) < len(pairs):
        names = Counter(name for name, _ in pairs)
        entry |= {name: GIVEN_TWICE for name, number in names.items() if number > 1}
    return entry


def kind_of(value: object) -> str:
    """Describes a value, for a message: "null", its type such as "list", or the reason if it is unreadable."""
    if isinstance(value, Unreadable) or _is_no_number(value):
        return str(value)
    return "null" if value is None else type(value).__name__


def _is_no_number(value: object) -> bool:
    """Whether a value is NaN or infinite: Python's JSON reader accepts these."""
    return isinstance(value, float) and not math.isfinite(value)


def column_problem(entry: Mapping[str, Any], role: str, column: str | None) -> str | None:
    """Returns the reason if the value of a column is not convertible to a text; None if it is, or if it is null."""
    value = entry.get(column) if column is not None else None
    if value is None or (isinstance(value, _WRITTEN) and not _is_no_number(value)):
        return None
    return f"the {role} is {kind_of(value)}"


def text_problem(value: object, options: SourceOptions) -> str | None:
    """Returns the reason if a caption, question or document is not a string; else None."""
    role = "question" if options.question_column else "text"
    return None if isinstance(value, str) else f"the {role} is {kind_of(value)}"


def group_of_row(entry: Mapping[str, Any], options: SourceOptions) -> str | None:
    """Returns the group in a row's group column; None without a group column or a value."""
    value = _text_of(entry, options.group_column)
    return None if value is None else f"group/{value}"


def group_of_text(text: str) -> str:
    """Returns the group of a text by its content. Texts equal up to case and blanks are in one group."""
    return f"text/{text_key(text).hex()[:32]}"


def unreadable_reason(folder: Path, path: Path) -> str | None:
    """Returns why a file of a source is not read: missing, outside of the folder, not a regular file, or too large.

    Only image files can be too large: other files are read by lines or rows.

    Raises:
        StorageError: the file system does not answer.
    """
    try:
        # Paths are resolved: "..", absolute names and symbolic links may lead out of the folder.
        if not path.resolve().is_relative_to(folder.resolve()):
            return "outside of the folder"
        status = path.stat()  # of the path as it will be opened: resolve() drops "missing/.."
    except (OSError, ValueError, RuntimeError) as error:  # the name is too long or has a NUL, or links form a loop
        if isinstance(error, OSError) and error.errno not in _ABSENT:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from None
        return "missing image" if path.suffix.lower() in PICTURE_SUFFIXES else "missing file"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    is_large = path.suffix.lower() in PICTURE_SUFFIXES and status.st_size > MAX_PICTURE_BYTES
    return TOO_LARGE if is_large else None


def picture_kind(options: SourceOptions) -> SourceKind:
    """The kind of a source of images, by its columns."""
    return "vqa" if options.question_column else "image_text"


def written(text: str, options: SourceOptions) -> dict[str, Any]:
    """Returns the text of ``options.written_column`` as a field of ``Row``: "question" or "text"."""
    return {"question" if options.question_column else "text": text}


def label_of_row(entry: Mapping[str, Any], options: SourceOptions) -> str | None:
    """Returns the label in a row's label column; None without a label column or a value."""
    return _text_of(entry, options.label_column)


def context_of_row(entry: Mapping[str, Any], options: SourceOptions) -> str | None:
    """Returns the context in a row's context column; None without a context column or a value."""
    return _text_of(entry, options.context_column)


def _text_of(entry: Mapping[str, Any], column: str | None) -> str | None:
    """The value of a column as a text; None for blanks, as in CSV."""
    value = entry.get(column) if column is not None else None
    text = "" if value is None else _written(value)
    return text if text.strip() else None


def _written(value: object) -> str:
    """The text of a value. Equal numbers have equal texts, such as 1, 1.0 and true: JSON may write 1 as 1.0."""
    if isinstance(value, int | float | Decimal) and not _is_no_number(value):
        if value == int(value):
            return str(int(value))
        # The digits of a decimal, without trailing zeros from its column's scale.
        return f"{value:f}".rstrip("0") if isinstance(value, Decimal) else str(value)
    return str(value)


def require_column(column: str, columns: Iterable[str], where: object, role: str = "") -> None:
    """Raises UserError if ``column`` is not in ``columns``.

    Args:
        column: the column to read.
        columns: the existing columns.
        where: the file or data set, for the message.
        role: role of the column, as in ``SourceOptions.columns``.
    """
    columns = list(columns)
    if column not in columns:
        # Any other column was named by the user, so this remedy would not help.
        remedy = "; name another by --text-column" if (role, column) == ("text", SourceOptions.text_column) else ""
        raise UserError(f'{where} has no column "{column}"{nearest(column, columns)}{remedy}')


def note_unread_columns(name: str, columns: Iterable[str], read: Iterable[str]) -> None:
    """Prints the ignored columns of a source."""
    if unread := sorted(set(columns) - set(read)):
        listed = ", ".join(map(repr, unread[:_LISTED_COLUMNS])) + (", ..." if len(unread) > _LISTED_COLUMNS else "")
        print(f'note: "{name}": {len(unread)} columns are not read: {listed}', file=sys.stderr)
