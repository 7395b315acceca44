"""Tables with a text column and optional pictures or labels: local files, saved data sets, and the Hub.

Hugging Face Datasets streams them. No loading scripts are run, and pictures are not decoded.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import (
    LocalSource,
    context_of_row,
    group_of_row,
    group_of_text,
    label_of_row,
    own_splits,
    require_column,
    split_of_name,
    split_of_row,
    unreadable_reason,
)
from m6.data.sources.text import passages
from m6.errors import UserError

if TYPE_CHECKING:
    import datasets


# What Hugging Face Datasets lets through of damaged files: an empty JSONL ends in StopIteration, features that are not
# an object in TypeError.
_READ_ERRORS = (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError, StopIteration, RecursionError)


class LocalTable(LocalSource):
    """Parquet, JSONL or CSV files with a text column and an optional image column.

    An image is bytes, Hugging Face's ``{"bytes", "path"}``, or a path relative to the file's folder. Files that are
    named after splits, such as ``train.jsonl`` or ``data/test-00000.parquet``, are these splits.

    Raises:
        UserError: forms are mixed, a file cannot be read, or a column is missing.
    """

    FORMATS: ClassVar[dict[str, str]] = {".parquet": "parquet", ".jsonl": "json", ".csv": "csv"}

    def __init__(self, name: str, files: list[Path], options: SourceOptions) -> None:
        super().__init__(name, files, options)
        if len({file.suffix for file in files}) > 1:
            raise UserError(
                f'"{name}" mixes {" and ".join(sorted({f.suffix for f in files}))}: build them as two sources'
            )
        by_split: dict[Split | None, list[str]] = {}
        for file in files:
            by_split.setdefault(split_of_name(file.stem), []).append(str(file))
        form = self.FORMATS[files[0].suffix]
        tables = {split: _load(name, form, data_files=part, split="train") for split, part in by_split.items()}
        self._table = _Table(name, tables, files[0].parent, options)
        self.kind, self.own_splits = self._table.kind, own_splits(options, by_split)
        self.columns = self._table.columns

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all files in order; documents are cut into passages."""
        return self._table.rows()


class SavedDataset(LocalSource):
    """A folder that ``save_to_disk`` of Hugging Face Datasets wrote, with its splits.

    Raises:
        UserError: the folder cannot be read, or a column is missing.
    """

    def __init__(self, name: str, folder: Path, options: SourceOptions) -> None:
        import datasets

        super().__init__(name, sorted(folder.rglob("*.arrow")), options)
        try:
            saved = datasets.load_from_disk(str(folder))
        except (*_READ_ERRORS, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"{name} cannot be opened: {_first_line(error)}") from None
        parts = saved.items() if isinstance(saved, datasets.DatasetDict) else [("", saved)]
        tables = {split_of_name(str(split)): data.to_iterable_dataset() for split, data in parts}
        if len(tables) < len(parts):
            raise UserError(f"{folder}: of its splits {', '.join(map(str, saved))} two have the same meaning")
        self._table = _Table(name, tables, None, options)
        self.kind, self.own_splits = self._table.kind, own_splits(options, tables)
        self.columns = self._table.columns

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all splits; documents are cut into passages."""
        return self._table.rows()


class HubTable:
    """A data set of the Hugging Face Hub, streamed at its current commit, which the manifest records.

    Args:
        name: name in the manifest.
        dataset: name on the Hub.
        split: split of the data set to read.
        options: columns, and the licence if the data set states none.

    Raises:
        UserError: the data set cannot be opened, states no licence, or lacks a column.
    """

    own_splits: frozenset[Split] = frozenset()

    def __init__(self, name: str, dataset: str, split: str, options: SourceOptions) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            info = HfApi().dataset_info(dataset)
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise UserError(f"hf:{dataset} cannot be opened: {_first_line(error)}") from None
        licence = options.licences.get(name, options.licence) or (
            info.card_data.get("license") if info.card_data else None
        )
        if not isinstance(licence, str):
            raise UserError(f"hf:{dataset} states no licence; read its page and pass --licence")
        self.name = name
        # Pinned to the commit, so that the manifest names exactly what is read.
        data = _load(f"hf:{dataset}", dataset, split=split, revision=info.sha)
        self._table = _Table(name, {None: data}, None, options)
        self.kind, self.own_splits = self._table.kind, own_splits(options, ())
        self.columns = self._table.columns
        package = f"hf:{dataset}:{split}"
        self._origin = Origin(package=package, version=str(info.sha), licence=licence, columns=dict(self.columns))

    def origin(self) -> list[Origin]:
        """Returns the data set with its commit as version."""
        return [self._origin]

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the split; documents are cut into passages."""
        return self._table.rows()


def _load(name: str, path: str, **arguments: Any) -> "datasets.IterableDataset":
    """Opens a table as a stream. Errors of Hugging Face Datasets become UserError."""
    import datasets

    try:
        data = datasets.load_dataset(path, streaming=True, **arguments)
        # JSON has no schema: the columns are found by reading the first rows.
        return data if data.features is not None else data._resolve_features()
    except (*_READ_ERRORS, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name} cannot be opened: {_first_line(error)}") from None


class _Table:
    """Rows of tables with the same columns, one for each split.

    Args:
        name: name of the source.
        tables: tables by split; None: without a split of its own.
        folder: folder that paths of pictures are relative to; None: only pictures inside of the table are read.
        options: columns.

    Raises:
        UserError: a column is missing.
    """

    def __init__(
        self,
        name: str,
        tables: "dict[Split | None, datasets.IterableDataset]",
        folder: Path | None,
        options: SourceOptions,
    ) -> None:
        self._name, self._tables, self._folder, self._options = name, tables, folder, options
        self._image_column = options.image_column
        for table in tables.values():
            columns = list(table.features)
            for column in options.columns().values():
                require_column(column, columns, name)
            if options.image_column is None and "image" in columns:
                self._image_column = "image"
        image = {} if self._image_column is None else {"image": self._image_column}
        self.columns = options.columns() | image
        self.kind: SourceKind = "text"
        if self._image_column or options.label_column:
            self.kind = "image_text" if self._image_column else "labelled_text"

    def rows(self) -> Iterator[Row]:
        """Yields the rows; documents are cut into passages."""
        number = 0
        for split, table in self._tables.items():
            for entry in self._entries(table, number):
                yield from self._rows_of(entry, f"{self._name}/{number}", split)
                number += 1

    def _entries(self, table: "datasets.IterableDataset", first: int) -> Iterator[dict[str, Any]]:
        import datasets

        features: dict[str, Any] = table.features
        wanted = dict.fromkeys(self.columns.values())
        table = table.select_columns([column for column in wanted if column in features])
        if self._image_column and isinstance(features.get(self._image_column), datasets.Image):
            # Undecoded: a picture that cannot be decoded must cost one row, not end the stream.
            table = table.cast_column(self._image_column, datasets.Image(decode=False))
        entries = iter(table)
        for number in itertools.count(first):
            try:
                entry = next(entries, None)
            except (*_READ_ERRORS, datasets.exceptions.DatasetsError) as error:
                raise UserError(f"{self._name}: reading stopped at row {number}: {_first_line(error)}") from None
            if entry is None:
                return
            yield entry

    def _rows_of(self, entry: dict[str, Any], identity: str, split: Split | None) -> Iterator[Row]:
        options = self._options
        if self._image_column:
            yield picture_row(entry, self._image_column, identity, split, self._folder, options)
            return
        if not options.label_column:
            yield from text_rows(entry, identity, split, options)
            return
        split, problem = _split_or_problem(entry, split, options)
        if problem is not None:
            yield Row(identity, identity, problem=problem)
            return
        text = entry[options.text_column]
        label, context = label_of_row(entry, options), context_of_row(entry, options)
        group = group_of_row(entry, options) or group_of_text(text)
        text = text[: options.passage_chars]
        yield Row(identity, group, text, answer=label, context=context, split=split)


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
    split, problem = _split_or_problem(entry, split, options)
    if problem is not None:
        return Row(identity, identity, problem=problem)
    image, problem = _picture_or_problem(entry.get(column), folder)
    group, label = group_of_row(entry, options), label_of_row(entry, options)
    return Row(identity, group, entry[options.text_column], image, answer=label, split=split, problem=problem)


def text_rows(entry: Mapping[str, Any], identity: str, split: Split | None, options: SourceOptions) -> Iterator[Row]:
    """Yields the passages of one entry of a table of texts, or one row with the problem.

    Args:
        entry: the values of the columns.
        identity: id of the entry; the ids of its passages begin with it.
        split: the split of the whole table, if it is one.
        options: columns, and the length of passages.
    """
    split, problem = _split_or_problem(entry, split, options)
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


def _split_or_problem(
    entry: Mapping[str, Any], split: Split | None, options: SourceOptions
) -> tuple[Split | None, str | None]:
    """The split of an entry and why it cannot be used: it has no text, or an unknown split."""
    text = entry.get(options.text_column)
    if not isinstance(text, str):
        return None, f"the text is {'null' if text is None else type(text).__name__}"
    named, problem = split_of_row(entry, options)
    return named or split, problem


def _picture_or_problem(value: object, folder: Path | None) -> tuple[bytes | None, str | None]:
    """The contents of a picture file, or why there is none."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    # A data set of the Hub (no folder) must not name local files.
    if isinstance(value, str) and folder is not None:
        picture = folder / value
        problem = unreadable_reason(folder, picture)
        value = None if problem else picture.read_bytes()
        return value, problem or (None if value else "missing image")
    return (value, None) if isinstance(value, bytes) and value else (None, "missing image")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
