"""Tables with a text column and optional images or labels: local files, saved data sets, and the Hub.

Hugging Face Datasets only streams the Hub. Local files are read here: one bad line of JSONL costs one row, a CSV cell
keeps its text, and no path in a file is followed out of its folder. No loading scripts are run, and images are not
decoded.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.folders import file_entries
from m6.data.sources.local import (
    LocalSource,
    column_problem,
    context_of_row,
    group_of_row,
    group_of_text,
    label_of_row,
    note_unread_columns,
    own_splits,
    picture_kind,
    require_column,
    splits_of_files,
    splits_of_names,
    unreadable_reason,
)
from m6.data.sources.rows import Columnar, arrow_files, class_name, named_file, picture_row, split_or_problem, text_rows
from m6.errors import UserError, first_line

if TYPE_CHECKING:
    import datasets


# Exceptions of Hugging Face Datasets for damaged files, such as TypeError if the features are not an object.
_READ_ERRORS = (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError, StopIteration, RecursionError)
_ROWS_FOR_COLUMNS = 1000  # JSONL has no schema: its columns are collected from the first rows


class LocalTable(LocalSource):
    """Parquet, JSONL or CSV files with a text column and an optional image column.

    An image is bytes, Hugging Face's ``{"bytes", "path"}``, or a path relative to the file's folder. A file named after
    a split, such as ``train.jsonl`` or ``data/test-00000.parquet``, is this split; else its top folder may name the
    split.

    Raises:
        UserError: forms are mixed, a file cannot be read, all files are empty, or a column is missing.
    """

    FORMATS: ClassVar[tuple[str, ...]] = (".parquet", ".jsonl", ".csv")

    def __init__(self, name: str, folder: Path, files: list[Path], options: SourceOptions) -> None:
        super().__init__(name, folder, files, options)
        forms = sorted({file.suffix.lower() for file in files})
        if len(forms) > 1:
            raise UserError(f'"{name}" mixes {" and ".join(forms)}: build them as two sources')
        together: dict[tuple[Split | None, Path], list[Path]] = {}
        splits = splits_of_files(name, [file.relative_to(folder) for file in files])
        for file in files:
            together.setdefault((splits[file.relative_to(folder)], file.parent), []).append(file)
        parts: list[_Part] = []
        for (split, parent), group in together.items():
            if forms == [".parquet"]:
                parts += [_columnar(name, split, parent, file) for file in group]
            else:
                parts.append(self._text_files(split, parent, group))
        if all(next(part.entries(part.columns[:1]), None) is None for part in parts):
            raise UserError(f'"{name}" is empty: {files[0]} has no rows')
        self._table = _Table(name, parts, options)
        self.kind, self.own_splits = self._table.kind, own_splits(options, (part.split for part in parts))
        self.columns = self._table.columns

    def _text_files(self, split: Split | None, folder: Path, files: list[Path]) -> "_Part":
        def entries(columns: list[str]) -> Iterator[dict[str, Any] | Row]:
            for file in files:
                for number, entry in file_entries(file):
                    if isinstance(entry, str):
                        line = f"{self.name}/{file.relative_to(self._folder).as_posix()}:{number}"
                        yield Row(line, line, problem=entry)
                    else:
                        yield entry

        sample = itertools.islice(entries([]), _ROWS_FOR_COLUMNS)
        columns = dict.fromkeys(column for entry in sample if isinstance(entry, dict) for column in entry)
        return _Part(split, folder, list(columns), entries)

    def _files_read(self) -> Iterable[Path]:
        return [*self._paths, *self.picture_files]

    @functools.cached_property
    def picture_files(self) -> list[Path]:
        """The readable files named in the image column."""
        return self._table.picture_files()

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all files in order; documents are cut into passages."""
        return self._table.rows()


class SavedDataset(LocalSource):
    """A data set with its splits, written by ``save_to_disk`` of Hugging Face Datasets.

    Raises:
        UserError: the folder cannot be read, names files outside itself, or holds no rows; or a column is missing.
    """

    def __init__(self, name: str, folder: Path, options: SourceOptions) -> None:
        named = arrow_files(folder)
        super().__init__(name, folder, sorted({file for files in named.values() for file in files}), options)
        meant = splits_of_names(name, [split for split in named if split]) | {"": None}
        splits = [split for split in map(meant.__getitem__, named) if split is not None]
        if len(set(splits)) < len(splits):
            raise UserError(f"{folder}: of its splits {', '.join(named)} two have the same meaning")
        tables = [_columnar(name, meant[split], None, file) for split, files in named.items() for file in files]
        if all(next(table.entries(table.columns[:1]), None) is None for table in tables):
            raise UserError(f'"{name}" is empty: {folder} has no rows')
        self._table = _Table(name, tables, options)
        self.kind, self.own_splits = self._table.kind, own_splits(options, splits)
        self.columns = self._table.columns

    @property
    def files(self) -> list[Path]:
        """The Arrow files of all splits."""
        return self._paths

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all splits; documents are cut into passages."""
        return self._table.rows()


class HubTable:
    """A data set of the Hugging Face Hub, streamed at its current commit. The manifest records the commit.

    Args:
        name: name in the manifest.
        dataset: name on the Hub.
        split: the split to read, or several joined by "+". Rows keep the split if its name is known. None: the split
            "train" is read, and its rows count as rows without a split.
        options: columns, and the licence if the data set states none.

    Raises:
        UserError: the data set cannot be opened, states no licence, or lacks a column.
    """

    def __init__(self, name: str, dataset: str, split: str | None, options: SourceOptions) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            info = HfApi().dataset_info(dataset)
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise UserError(f"hf:{dataset} cannot be opened: {first_line(error)}") from None
        licence = options.licences.get(name, options.licence) or (
            info.card_data.get("license") if info.card_data else None
        )
        if not isinstance(licence, str):
            raise UserError(f"hf:{dataset} states no licence; read its page and pass --licence")
        self.name = name
        splits: dict[str, Split | None] = {"train": None}
        if split is not None:
            splits = splits_of_names(name, [part.strip() for part in split.split("+")])
        # Pinned to the commit recorded in the manifest.
        load = functools.partial(_load, f"hf:{dataset}", dataset, revision=info.sha)
        parts = [_streamed(name, meant, load(split=part)) for part, meant in splits.items()]
        self._table = _Table(name, parts, options)
        self.kind, self.own_splits = self._table.kind, own_splits(options, splits.values())
        self.columns = self._table.columns
        package = f"hf:{dataset}:{'+'.join(splits)}"
        self._origin = Origin(package=package, version=str(info.sha), licence=licence, columns=dict(self.columns))

    def origin(self) -> list[Origin]:
        """Returns the data set with its commit as version."""
        return [self._origin]

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the splits; documents are cut into passages."""
        return self._table.rows()


def _load(name: str, path: str, **arguments: Any) -> "datasets.IterableDataset":
    """Opens a table as a stream. Errors of Hugging Face Datasets become UserError."""
    import datasets

    try:
        data = datasets.load_dataset(path, streaming=True, **arguments)
        # JSON files on the Hub have no schema: reading the first rows finds the columns.
        return data if data.features is not None else data._resolve_features()
    except (*_READ_ERRORS, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name} cannot be opened: {first_line(error)}") from None


@dataclass(frozen=True)
class _Part:
    """Rows of one split, in one folder.

    Attributes:
        split: split of the rows; None: rows without a split.
        folder: base folder of image paths; None: only images inside the table are read.
        columns: names of the columns; empty if no row is readable.
        entries: reads some columns of each row. An unreadable line becomes a row with a problem.
    """

    split: Split | None
    folder: Path | None
    columns: list[str]
    entries: Callable[[list[str]], Iterator[dict[str, Any] | Row]]


def _columnar(name: str, split: Split | None, folder: Path | None, path: Path) -> _Part:
    """The part of a Parquet or Arrow file."""
    try:
        file = Columnar.open(path)
    except UserError:
        raise
    except _READ_ERRORS as error:
        raise UserError(f"{name} cannot be opened: {path}: {first_line(error)}") from None

    def entries(columns: list[str]) -> Iterator[dict[str, Any] | Row]:
        number = 0
        try:
            for entry in file.entries(columns):
                yield entry
                number += 1
        except UserError:
            raise
        except _READ_ERRORS as error:
            raise UserError(f"{path}: reading stopped at row {number}: {first_line(error)}") from None

    return _Part(split, folder, file.columns, entries)


def _streamed(name: str, split: Split | None, table: "datasets.IterableDataset") -> _Part:
    # Undecoded: a damaged image must cost one row instead of ending the stream, and decoding could open a local file.
    return _Part(split, None, list(table.features), functools.partial(_stream, name, table.decode(False)))


def _stream(name: str, table: "datasets.IterableDataset", columns: list[str]) -> Iterator[dict[str, Any]]:
    import datasets

    features: dict[str, Any] = table.features
    table = table.select_columns([column for column in columns if column in features])
    classes = {
        column: features[column].names for column in columns if isinstance(features.get(column), datasets.ClassLabel)
    }
    entries = iter(table)
    for number in itertools.count():
        try:
            entry = next(entries, None)
        except (*_READ_ERRORS, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"{name}: reading stopped at row {number}: {first_line(error)}") from None
        if entry is None:
            return
        yield entry | {column: class_name(entry[column], names) for column, names in classes.items()}


class _Table:
    """Rows of tables with the same columns.

    Args:
        name: name of the source.
        parts: the tables.
        options: columns.

    Raises:
        UserError: a column is missing.
    """

    def __init__(self, name: str, parts: list[_Part], options: SourceOptions) -> None:
        self._name, self._parts, self._options = name, parts, options
        self._image_column = options.image_column
        if self._image_column is None and any("image" in part.columns for part in parts):
            self._image_column = "image"
        self.columns = options.columns()
        self.kind: SourceKind = "text"
        if self._image_column:
            self.kind = picture_kind(options)
            self.columns.pop("context", None)
        elif options.question_column:
            raise UserError(
                f'--question-column {options.question_column}: questions are about pictures, of which "{name}" has no '
                "column; name it by --image-column"
            )
        elif options.label_column:
            self.kind = "labelled_text"
        for part in parts:
            for role, column in self.columns.items():
                if part.columns:
                    require_column(column, part.columns, name, role)
        if self._image_column:
            self.columns["image"] = self._image_column
        note_unread_columns(name, {column for part in parts for column in part.columns}, self.columns.values())

    def rows(self) -> Iterator[Row]:
        """Yields the rows; documents are cut into passages."""
        number = 0
        for part in self._parts:
            for entry in part.entries(list(dict.fromkeys(self.columns.values()))):
                if isinstance(entry, Row):
                    yield entry
                    continue
                yield from self._rows_of(entry, f"{self._name}/{number}", part)
                number += 1

    def picture_files(self) -> list[Path]:
        """Returns the readable files named in the image column."""
        found: set[Path] = set()
        for part in self._parts:
            if self._image_column in part.columns and part.folder is not None:
                for entry in part.entries([self._image_column]):
                    file = None if isinstance(entry, Row) else named_file(entry.get(self._image_column), part.folder)
                    if file is not None and unreadable_reason(part.folder, file) is None:
                        found.add(file)
        return sorted(found)

    def _rows_of(self, entry: dict[str, Any], identity: str, part: _Part) -> Iterator[Row]:
        options = self._options
        if self._image_column:
            yield picture_row(entry, self._image_column, identity, part.split, part.folder, options)
            return
        if not options.label_column:
            yield from text_rows(entry, identity, part.split, options)
            return
        split, problem = split_or_problem(entry, options.text_column, part.split, options)
        problem = problem or column_problem(entry, "context", options.context_column)
        if problem is not None:
            yield Row(identity, identity, problem=problem)
            return
        text, limit = entry[options.text_column], options.passage_chars
        label, context = label_of_row(entry, options), context_of_row(entry, options)
        group = group_of_row(entry, options) or group_of_text(text)
        cut = max(len(text), len(context or "")) > limit
        context = context and context[:limit]
        yield Row(identity, group, text[:limit], answer=label, context=context, split=split, cut=cut)
