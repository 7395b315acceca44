"""What the sources of the user's own files share: the licence, links that are refused, splits and columns."""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from m6 import files
from m6.data.manifest import SPLITS, Origin, SourceKind, Split
from m6.data.sources.base import SourceOptions
from m6.data.sources.packages import combined_sha256
from m6.data.sources.text import text_key
from m6.errors import UserError, nearest

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".svg"})
MAX_PICTURE_BYTES = 64 << 20  # a larger file or member of an archive is not read into memory
TOO_LARGE = f"larger than {MAX_PICTURE_BYTES >> 20} MiB"
# The names that Hugging Face Datasets knows for splits.
_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


class LocalSource:
    """Base class of the sources that read local files.

    Args:
        name: name in the manifest.
        folder: folder of the files.
        paths: the files; the checksum of the origin covers them and their paths in the folder.
        options: must have a licence for this name.

    Attributes:
        columns: which column is read as "text", "question", "image", "label", "split" and "group"; empty for files
            without columns.

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
        # Paths count, because folders name splits, labels and captions; not the folder itself: a copy is the same data.
        checksum = combined_sha256(
            (os.path.relpath(file, self._folder), files.sha256(file)) for file in self._files_read()
        )
        columns = dict(self.columns) or None
        return [Origin(package=self.name, version="local", licence=self._licence, sha256=checksum, columns=columns)]

    def _files_read(self) -> Iterable[Path]:
        return self._paths


def own_splits(options: SourceOptions, named: Iterable[Split | None]) -> frozenset[Split]:
    """Returns the splits that a source defines: by its split column, or by the names of folders and files."""
    return frozenset(SPLITS if options.split_column is not None else filter(None, named))


def split_of_name(name: str) -> Split | None:
    """Returns the split that a folder or a file is named after, such as ``val`` or ``train-00000-of-00002``."""
    return next((_SPLITS[part] for part in re.split("[^a-z]+", name.lower()) if part in _SPLITS), None)


def split_of_folder(relative: PurePath) -> Split | None:
    """Returns the split that the first folder of a relative path is named after."""
    return split_of_name(relative.parts[0]) if len(relative.parts) > 1 else None


def split_of_file(relative: PurePath) -> Split | None:
    """Returns the split that a file is named after, or else the first folder of its relative path."""
    return split_of_name(relative.name) or split_of_folder(relative)


def split_of_row(entry: Mapping[str, Any], options: SourceOptions) -> tuple[Split | None, str | None]:
    """Returns the split that a row names in its split column, and the problem if it names none."""
    if options.split_column is None:
        return None, None
    value = entry.get(options.split_column)
    split = _SPLITS.get(value.lower()) if isinstance(value, str) else None
    return split, None if split else f"unknown split {str(value)[:20]!r}"


def group_of_row(entry: Mapping[str, Any], options: SourceOptions) -> str | None:
    """Returns the group that a row names in its group column; None without a group column or a value."""
    value = None if options.group_column is None else entry.get(options.group_column)
    return None if value is None else f"group/{value}"


def group_of_text(text: str) -> str:
    """Returns the group of a text by its content: equal texts, but for case and blanks, are in one split."""
    return f"text/{text_key(text).hex()[:32]}"


def unreadable_reason(folder: Path, path: Path) -> str | None:
    """Returns why a file of a source is not read: it is missing, outside of the folder, no regular file, or too large.

    Only pictures are too large: other files are read by lines or rows.
    """
    try:
        # Resolved first: "..", absolute names and symbolic links must not lead out of the folder.
        resolved = path.resolve()
        if not resolved.is_relative_to(folder.resolve()):
            return "outside of the folder"
        status = path.stat()  # not of the resolved path, which leaves out "missing/.."
    except (OSError, ValueError, RuntimeError):  # the name is too long or has a NUL, or links form a loop
        return "missing image" if path.suffix.lower() in PICTURE_SUFFIXES else "missing file"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    is_large = path.suffix.lower() in PICTURE_SUFFIXES and status.st_size > MAX_PICTURE_BYTES
    return TOO_LARGE if is_large else None


def picture_kind(options: SourceOptions) -> SourceKind:
    """The kind of a source of pictures with columns."""
    return "vqa" if options.question_column else "image_text"


def written(text: str, options: SourceOptions) -> dict[str, str]:
    """Returns the field of a row of a picture that holds what was read from ``options.written_column``."""
    return {"question" if options.question_column else "text": text}


def label_of_row(entry: Mapping[str, Any], options: SourceOptions) -> str | None:
    """Returns the label that a row names in its label column; None without a label column or a value."""
    value = None if options.label_column is None else entry.get(options.label_column)
    return None if value is None else str(value)


def context_of_row(entry: Mapping[str, Any], options: SourceOptions) -> str | None:
    """Returns the beginning of what a row holds in its context column; None without a context column or a value."""
    value = None if options.context_column is None else entry.get(options.context_column)
    return None if value is None else str(value)[: options.passage_chars]


def require_column(column: str, columns: Iterable[str], where: object, role: str = "") -> None:
    """Raises UserError if ``column`` is not in ``columns``.

    Args:
        column: the column that is read.
        columns: those that are there.
        where: names the file or data set in the message.
        role: what the column holds, as in ``SourceOptions.columns``.
    """
    columns = list(columns)
    if column not in columns:
        # Other columns than this one are only read where the user named them.
        remedy = "; name another by --text-column" if (role, column) == ("text", SourceOptions.text_column) else ""
        raise UserError(f'{where} has no column "{column}"{nearest(column, columns)}{remedy}')
