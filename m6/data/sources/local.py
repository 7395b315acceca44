"""Common code of sources of the user's own files: licence, refused links, columns, and names of splits."""

import errno
import math
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any
from uuid import UUID

from m6 import files
from m6.data.manifest import SPLITS, Origin, SourceKind, Split
from m6.data.sources.base import SourceOptions
from m6.data.sources.packages import combined_sha256
from m6.data.sources.text import text_key
from m6.errors import StorageError, UserError, nearest

# The names of splits in Hugging Face Datasets.
SPLIT_WORDS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# A shard number may follow, as in train-0000 and train-00000-of-00002. Some Hub files add a checksum to it.
_FORM = re.compile(rf"({'|'.join(SPLIT_WORDS)})([-_.]\d+([-_]of[-_]\d+(-[0-9a-f]+)?)?)?")


def own_splits(options: SourceOptions, named: Iterable[Split | None]) -> frozenset[Split]:
    """Returns the splits defined by a source: by its split column, or by the names of folders and files."""
    return frozenset(SPLITS if options.split_column is not None else filter(None, named))


def split_meant(name: str) -> Split | None:
    """Returns the split meant by a word of a name, as in ``validation_matched``. The word may be there by chance."""
    return next((SPLIT_WORDS[part] for part in re.split("[^a-z]+", name.lower()) if part in SPLIT_WORDS), None)


def split_folders(source: str, files: Iterable[PurePath]) -> dict[str, Split]:
    """Returns the splits of the top folders of a source, by their names.

    Empty unless all top folders are named after splits: a class or a topic may also be called ``train`` or ``dev``. A
    word in a longer name, as in ``train2017``, counts if every folder has one and some are for training. Ignored names
    of splits are reported on stderr, because held-out rows might become training rows.

    Args:
        source: name of the source.
        files: the files of the source, relative to it.
    """
    folders = list(dict.fromkeys(file.parts[0] for file in files if len(file.parts) > 1))
    named = {folder: _split_of_name(folder) for folder in folders}
    meant = {folder: split_meant(folder) for folder in folders}
    if not all(named.values()) and "train" in meant.values():
        named = meant
    splits = {folder: split for folder, split in named.items() if split is not None}
    if len(splits) == len(named):
        return splits
    if any(meant.values()):
        like = next(folder for folder, split in meant.items() if split is not None)
        other = next((folder for folder, split in meant.items() if split is None), None)
        reason = "none is for training" if other is None else f'"{other}" is not'
        print(
            f'note: "{source}": its folders are no splits, although "{like}" is named after one: {reason}',
            file=sys.stderr,
        )
    return {}


def split_of_file(file: PurePath, folders: Mapping[str, Split]) -> Split | None:
    """Returns the split in the name of a file, or else the split of its top folder.

    Args:
        file: relative to the source.
        folders: result of ``split_folders``.
    """
    return _split_of_name(PurePath(file.name.lower().removesuffix(".gz")).stem) or split_of_folder(file, folders)


def split_of_folder(file: PurePath, folders: Mapping[str, Split]) -> Split | None:
    """Returns the split of a file's top folder. ``folders`` is as in ``split_of_file``."""
    return folders.get(file.parts[0])


def splits_of_files(source: str, files: Sequence[PurePath]) -> dict[PurePath, Split | None]:
    """Returns the split of each file. Ignored names of splits are reported on stderr, as by ``split_folders``.

    A word in a longer name, as in ``data_train.csv``, counts if every file has one and some are for training. Otherwise
    the word may be chance, as in ``ab_test.csv``.

    Args:
        source: name of the source.
        files: relative to the source.
    """
    folders = split_folders(source, files)
    splits = {file: split_of_file(file, folders) for file in files}
    meant = {file: split_meant(file.name) for file in files}
    if not any(splits.values()) and all(meant.values()) and "train" in meant.values():
        return meant
    for file, split in meant.items():
        if splits[file] is None and split is not None:
            print(
                f'note: "{source}": {file} is not taken for the split {split}; if it is, name it '
                f"{split}{file.suffix}, or {split}-0000{file.suffix} and so on",
                file=sys.stderr,
            )
            break
    return splits


def splits_of_names(source: str, names: Iterable[str]) -> dict[str, Split | None]:
    """Returns the split meant by each split name of a data set. Names without a meaning are noted on stderr.

    Args:
        source: name of the source.
        names: names of the splits. Only splits have these names, so a word in them, as in ``validation_matched``, is
            not chance.
    """
    splits = {name: split_meant(name) for name in names}
    for name, split in splits.items():
        if split is None:
            print(
                f'note: "{source}": the name of its split "{name}" does not say train, validation or test; its rows '
                "are divided as rows without a split are",
                file=sys.stderr,
            )
    return splits


def _split_of_name(name: str) -> Split | None:
    match = _FORM.fullmatch(name.lower())
    return SPLIT_WORDS[match[1]] if match else None


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


def is_apple_double(file: PurePath) -> bool:
    """Whether macOS wrote a file for the attributes of another one, such as ``._a.jpg``. It holds no data."""
    return file.name.startswith("._") or "__MACOSX" in file.parts[:1]


def is_hidden(file: PurePath) -> bool:
    """Whether a file of a source, or a folder above it, is hidden, such as ``.ipynb_checkpoints/a-checkpoint.csv``.

    Args:
        file: relative to the source.
    """
    return is_apple_double(file) or any(part.startswith(".") and part not in (".", "..") for part in file.parts)


def note_hidden(source: str, hidden: Sequence[PurePath]) -> None:
    """Prints the number of hidden files that are not read."""
    if hidden:
        print(f'note: "{source}": {len(hidden)} hidden files are not read, such as {hidden[0]}', file=sys.stderr)


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
