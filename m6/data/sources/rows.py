"""Rows of the user's own tables and texts.

An entry of a table is an image with its caption, or a text to cut into passages. A .txt or .md file is a text.

Parquet and Arrow files are read by pyarrow only: no image is decoded, no path in them is followed. ``save_to_disk`` of
Hugging Face Datasets writes a folder of Arrow files by split.

    SAVED/dataset_dict.json               {"splits": ["train", "test"]}; without it, SAVED is one data set
    SAVED/train/state.json                {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
    SAVED/train/data-00000-of-00001.arrow

Only these keys are read: the view of the rows set by ``with_format`` does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m6.data.manifest import SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import (
    MAX_PICTURE_BYTES,
    TOO_LARGE,
    LocalSource,
    Unreadable,
    entry_of,
    group_of_row,
    group_of_text,
    kind_of,
    label_of_row,
    split_folders,
    split_of_folder,
    split_of_row,
    text_problem,
    unreadable_reason,
    written,
)
from m6.data.sources.text import clean, passages
from m6.errors import UserError
from m6.files import reading

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BATCH_ROWS = 64  # most rows of a batch
_FEW_ROWS = 8  # rows of a batch that may all hold the largest value of their file
_BATCH_BYTES = 256 << 20  # of a batch
_HUGGING_FACE = b"huggingface"  # key of the schema's metadata for the features of Hugging Face Datasets


@dataclass(frozen=True)
class Columnar:
    """A Parquet file, or an Arrow file written by Hugging Face Datasets.

    Attributes:
        path: the file.
        columns: names of its columns.
        classes: class names of each ``ClassLabel`` column of Hugging Face Datasets.
    """

    path: Path
    columns: list[str]
    classes: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Columnar:
        """Reads the names of the columns.

        Raises:
            StorageError: storage failed; the file may be whole.
            pa.ArrowException, OSError, ValueError: the file or its features of Hugging Face Datasets are damaged.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        with reading(path):
            if _is_parquet(path):
                schema = pq.read_schema(path)
            else:
                with pa.OSFile(str(path)) as source:
                    schema = pa.ipc.open_stream(source).schema
        return cls(path, schema.names, _classes(schema.metadata or {}))

    def entries(self, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Yields each row's values of some columns. Columns missing in the file are left out.

        Raises:
            StorageError: storage failed; the file may be whole.
            pa.ArrowException, OSError: the rest of the file is damaged.
        """
        wanted = [column for column in columns if column in self.columns]
        for batch in self._batches(wanted):
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from self._entries(batch.slice(start, _BATCH_ROWS))

    def _batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with reading(self.path):
            if _is_parquet(self.path):
                with pq.ParquetFile(self.path) as file:
                    for number in range(file.num_row_groups):
                        rows = _batch_rows(file.metadata.row_group(number), columns)
                        for batch in file.iter_batches(rows, row_groups=[number], columns=columns):
                            # A name also selects nested columns with this prefix, so the batch may contain others.
                            yield _selected(batch, columns)
            else:
                with pa.OSFile(str(self.path)) as source:
                    for batch in pa.ipc.open_stream(source):
                        batch.validate(full=True)  # offsets of a damaged file may point outside its memory
                        yield _selected(batch, columns)

    def _entries(self, batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        names = batch.schema.names
        columns = [list(self._values(name, values)) for name, values in zip(names, batch.columns, strict=True)]
        for row in range(batch.num_rows):
            yield entry_of([(name, values[row]) for name, values in zip(names, columns, strict=True)])

    def _values(self, name: str, values: pa.Array) -> Iterable[Any]:
        try:
            read = values.to_pylist()
        except Exception:  # a cell may have no Python value, such as a date after the year 9999
            read = [_value(cell) for cell in values]
        classes = self.classes.get(name)
        return read if classes is None else (class_name(number, classes) for number in read)


def class_name(value: object, names: list[str]) -> object:
    """Returns the name of a class; None for -1, the mark of Hugging Face Datasets for a row without a class.

    A number out of range becomes ``Unreadable``. A value of another type is returned as it is.
    """
    if not isinstance(value, int):
        return value
    if value == -1:
        return None
    return names[value] if 0 <= value < len(names) else Unreadable(f"number {value} of {len(names)} classes")


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _batch_rows(group: pq.RowGroupMetaData, columns: list[str]) -> int:
    """The rows of a batch of a row group.

    All rows may refer to one value of a dictionary, which is in the file once. So a file of kilobytes may hold rows of
    gigabytes.
    """
    chunks = map(group.column, range(group.num_columns))
    size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns)
    rows = max(_FEW_ROWS, min(_BATCH_ROWS, _BATCH_BYTES // max(size, 1)))
    return max(1, min(rows, _BATCH_BYTES * group.num_rows // max(size, 1)))


def _selected(batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    """The columns of these names, even if two columns have the same name."""
    import pyarrow as pa

    places = [place for place, name in enumerate(batch.schema.names) if name in columns]
    if not places:  # keeps the number of rows
        return batch.select([])
    return pa.RecordBatch.from_arrays(
        [batch.column(place) for place in places], schema=pa.schema([batch.schema.field(place) for place in places])
    )


def _value(cell: pa.Scalar) -> object:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return Unreadable("not UTF-8")
    except Exception as error:  # pyarrow and libraries of dates raise many types
        return Unreadable(f"a {cell.type} without a value ({type(error).__name__})")


def _classes(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The class names of Hugging Face Datasets in the metadata of a schema."""
    try:
        features = ((json.loads(metadata.get(_HUGGING_FACE, b"{}")).get("info") or {}).get("features") or {}).items()
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and "names" in feature
        }
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise ValueError("its features of Hugging Face Datasets are damaged") from None


DICT_NAME, STATE_NAME = "dataset_dict.json", "state.json"
_MAX_JSON_BYTES = 64 << 20


def is_saved(folder: Path) -> bool:
    """Whether a folder holds a data set written by ``save_to_disk``."""
    return any((folder / name).is_file() for name in (STATE_NAME, DICT_NAME))


def arrow_files(folder: Path) -> dict[str, list[Path]]:
    """Returns the Arrow files of each split in order. A data set without splits has one entry "".

    Raises:
        UserError: a file is missing, damaged or outside the folder of its split, or a split is outside the folder.
    """
    if (folder / STATE_NAME).is_file():
        return {"": _files_of(folder, folder)}
    file = folder / DICT_NAME
    splits = _object(folder, file).get("splits")
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise UserError(f'{file}: expected "splits" with a list of names')
    for split in splits:
        if problem := unreadable_reason(folder, folder / split / STATE_NAME):
            raise UserError(f"{file} names the split {split!r}, whose {STATE_NAME} is not read ({problem})")
    return {split: _files_of(folder, folder / split) for split in splits}


def _files_of(root: Path, folder: Path) -> list[Path]:
    file = folder / STATE_NAME
    state = _object(root, file)
    if state.get("_indices_data_files"):  # written by versions before 2.0 of datasets
        raise UserError(f"{file} names a selection of rows, which is not read; save the rows by flatten_indices()")
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise UserError(f'{file}: expected "_data_files" with a list of objects')
    for each in listed:
        name = each.get("filename")
        if not isinstance(name, str):
            raise UserError(f'{file}: expected "filename" with a name in each of "_data_files"')
        # The second check refuses files of another split, which lie inside the root.
        if problem := unreadable_reason(root, folder / name) or unreadable_reason(folder, folder / name):
            raise UserError(f"{file} names {name!r}, which is not read ({problem})")
    return [folder / each["filename"] for each in listed]


def _object(folder: Path, file: Path) -> dict[str, Any]:
    if problem := unreadable_reason(folder, file):
        raise UserError(f"{file} is not read ({problem})")
    if file.stat().st_size > _MAX_JSON_BYTES:
        raise UserError(f"{file} is larger than {_MAX_JSON_BYTES >> 20} MiB")
    try:
        with reading(file):
            value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):  # a StorageError
            raise
        raise UserError(f"{file} is not valid JSON") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected an object")
    return value


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
        problem = "a text without letters and digits" if clean(text) else "empty text"
        yield Row(identity, identity, problem=problem)


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
        if value.keys().isdisjoint(("bytes", "path")):
            return None, "the image is dict without bytes and path"
        value = value.get("bytes") or value.get("path")
    if value is None or value in ("", b""):
        return None, "missing image"
    if isinstance(value, bytes):
        return (value, None) if len(value) <= MAX_PICTURE_BYTES else (None, TOO_LARGE)
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
