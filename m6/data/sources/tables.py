"""Tables with a text column and optional pictures or labels: local Parquet and JSONL files, and Hub data sets.

Hugging Face Datasets streams both. No loading scripts are run, and pictures are not decoded.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from m6.data.manifest import Origin, SourceKind
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.local import LocalSource, require_column, unreadable_reason
from m6.data.sources.text import passages
from m6.errors import UserError

if TYPE_CHECKING:
    import datasets


# What Hugging Face Datasets lets through of damaged files: an empty JSONL ends in StopIteration, features that are not
# an object in TypeError.
_READ_ERRORS = (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError, StopIteration, RecursionError)


class LocalTable(LocalSource):
    """Parquet or JSONL files with a text column and an optional image column.

    An image is bytes, Hugging Face's ``{"bytes", "path"}``, or a path relative to the file's folder.

    Raises:
        UserError: Parquet and JSONL files are mixed, a file cannot be read, or a column is missing.
    """

    FORMATS: ClassVar[dict[str, str]] = {".parquet": "parquet", ".jsonl": "json"}

    def __init__(self, name: str, files: list[Path], options: SourceOptions) -> None:
        super().__init__(name, files, options)
        if len({file.suffix for file in files}) > 1:
            raise UserError(f'"{name}" mixes Parquet and JSONL files; build them as two sources')
        self._data: datasets.IterableDataset = _load(
            name, self.FORMATS[files[0].suffix], data_files=[str(file) for file in files], split="train"
        )
        self._image_column = _image_column(self._data, options, name)
        self.kind = _kind(self._image_column, options)

    def rows(self) -> Iterator[Row]:
        """Yields the rows of all files in order; documents are cut into passages."""
        folder = self._paths[0].parent
        return _table_rows(self.name, self._data, self._image_column, self._options, folder)


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

    has_test_split = False

    def __init__(self, name: str, dataset: str, split: str, options: SourceOptions) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            info = HfApi().dataset_info(dataset)
        except (HfHubHTTPError, OSError, ValueError) as error:
            raise UserError(f"hf:{dataset} cannot be opened: {_first_line(error)}") from None
        licence = options.licence or (info.card_data.get("license") if info.card_data else None)
        if not isinstance(licence, str):
            raise UserError(f"hf:{dataset} states no licence; read its page and pass --licence")
        self.name, self._options = name, options
        self._origin = Origin(package=f"hf:{dataset}:{split}", version=str(info.sha), licence=licence)
        # Pinned to the commit, so that the manifest names exactly what is read.
        self._data: datasets.IterableDataset = _load(f"hf:{dataset}", dataset, split=split, revision=info.sha)
        self._image_column = _image_column(self._data, options, name)
        self.kind = _kind(self._image_column, options)

    def origin(self) -> list[Origin]:
        """Returns the data set with its commit as version."""
        return [self._origin]

    def rows(self) -> Iterator[Row]:
        """Yields the rows of the split; documents are cut into passages."""
        return _table_rows(self.name, self._data, self._image_column, self._options, None)


def _load(name: str, path: str, **arguments: Any) -> "datasets.IterableDataset":
    """Opens a table as a stream. Errors of Hugging Face Datasets become UserError."""
    import datasets

    try:
        data = datasets.load_dataset(path, streaming=True, **arguments)
        # JSON has no schema: the columns are found by reading the first rows.
        return data if data.features is not None else data._resolve_features()
    except (*_READ_ERRORS, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"{name} cannot be opened: {_first_line(error)}") from None


def _image_column(data: "datasets.IterableDataset", options: SourceOptions, name: str) -> str | None:
    """Returns the column of pictures: the chosen one, or ``image`` if it exists. None for a table without pictures."""
    columns = list(data.features)
    require_column(options.text_column, columns, name)
    if options.label_column is not None:
        if options.image_column is not None:
            raise UserError(
                f"--label-column {options.label_column} and --image-column {options.image_column}: a table has "
                "either labels or pictures; choose one"
            )
        require_column(options.label_column, columns, name)
        return None
    if options.image_column is not None:
        require_column(options.image_column, columns, name)
        return options.image_column
    return "image" if "image" in columns else None


def _table_rows(
    name: str, data: "datasets.IterableDataset", image_column: str | None, options: SourceOptions, folder: Path | None
) -> Iterator[Row]:
    import datasets

    features: dict[str, Any] = data.features
    columns = [column for column in (options.text_column, image_column, options.label_column) if column]
    data = data.select_columns(columns)
    if image_column and isinstance(features.get(image_column), datasets.Image):
        # Undecoded: a picture that cannot be decoded must cost one row, not end the stream.
        data = data.cast_column(image_column, datasets.Image(decode=False))
    entries = iter(data)
    for number in itertools.count():
        try:
            entry = next(entries, None)
        except (*_READ_ERRORS, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"{name}: reading stopped at row {number}: {_first_line(error)}") from None
        if entry is None:
            return
        identity, text = f"{name}/{number}", entry[options.text_column]
        if not isinstance(text, str):
            yield Row(identity, identity, problem=f"the text is {'null' if text is None else type(text).__name__}")
            continue
        if options.label_column:
            yield Row(identity, identity, text[: options.passage_chars], answer=_label(entry[options.label_column]))
        elif image_column:
            image = _picture_bytes(entry[image_column], folder)
            yield Row(identity, identity, text, image, problem=None if image else "missing image")
        else:
            cut = list(passages(text, options.passage_chars))
            if not cut:
                yield Row(identity, identity, problem="empty text")
            for index, passage in enumerate(cut):
                yield Row(f"{identity}/{index}", identity, passage)


def _kind(image_column: str | None, options: SourceOptions) -> SourceKind:
    if options.label_column:
        return "labelled_text"
    return "image_text" if image_column else "text"


def _label(value: object) -> str | None:
    return None if value is None else str(value)


def _picture_bytes(value: object, folder: Path | None) -> bytes | None:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    # A data set of the Hub (no folder) must not name local files.
    if isinstance(value, str) and folder is not None:
        picture = folder / value
        return picture.read_bytes() if unreadable_reason(folder, picture) is None else None
    return value if isinstance(value, bytes) else None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
