"""The documents of one part between the stages: a Parquet file, written atomically."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from m6.data.manifest import Split
from m6.data.sources.base import Row
from m6.files import atomic_path

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("split", pa.string()),
        pa.field("text", pa.string(), nullable=False),
        pa.field("image", pa.binary()),
        pa.field("answer", pa.string()),
        pa.field("caption", pa.uint64(), nullable=False),
        pa.field("key", pa.uint64(), nullable=False),
        pa.field("order", pa.uint64(), nullable=False),
        pa.field("size", pa.uint32(), nullable=False),
        pa.field("held_out", pa.uint8(), nullable=False),
    ]
)
_GROUP_BYTES = 8 << 20
_READ_ROWS = 64
_COLUMNS = ["id", "group", "split", "text", "image", "answer"]
_NAMED = 0
_HELD_OUT: dict[Split | None, int] = {"test": 1, "validation": 2, "train": 3, None: 3}


@dataclass(frozen=True)
class Ranking:
    """Data for choosing the kept document among copies: arrays of one entry per document.

    Attributes:
        key: digest of a text's compared form or of an image's pixels. Equal documents have equal keys; uint64.
        held_out: 0 for an image of a named set, 1 for the test split of its source, 2 for validation, 3 for others;
            uint8.
        size: characters of a text, or pixels of an image file; uint32.
        order: digest of text and id, to break ties; uint64.
        caption: digest of the compared form of a caption; 0 for a text; uint64.
    """

    key: NDArray[np.uint64]
    held_out: NDArray[np.uint8]
    size: NDArray[np.uint32]
    order: NDArray[np.uint64]
    caption: NDArray[np.uint64]


class DocumentWriter:
    """Writes the documents of a part. The file gets its final name if the context ends without an exception."""

    def __init__(self, file: Path) -> None:
        self._atomic = atomic_path(file)
        self._rows: list[dict[str, object]] = []
        self._pending = 0

    def __enter__(self) -> DocumentWriter:
        self._writer = pq.ParquetWriter(self._atomic.__enter__(), _SCHEMA, compression="zstd")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._writer.close()
        self._atomic.__exit__(kind, error, trace)

    def write(self, row: Row, key: int, order: int, size: int, caption: int = 0, is_named: bool = False) -> None:
        """Appends a document with a group.

        Args:
            row: the document.
            key, order, size, caption: as in ``Ranking``.
            is_named: whether it is an image of a named set.
        """
        values: dict[str, object] = {name: getattr(row, name) for name in _COLUMNS}
        held_out = _NAMED if is_named else _HELD_OUT[row.split]
        ranks = {"key": key, "order": order, "size": size, "caption": caption, "held_out": held_out}
        self._rows.append(values | ranks)
        self._pending += len(row.text) + len(row.image or b"")
        if self._pending >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA))
        self._rows, self._pending = [], 0


def read_documents(file: Path) -> Iterator[Row]:
    """Yields the documents of a part in order."""
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(_READ_ROWS, columns=_COLUMNS):
            for values in batch.to_pylist():
                yield Row(**values)


def read_ranking(file: Path) -> Ranking:
    """Reads the ranking of the documents of a part, without their texts."""
    names = [field.name for field in fields(Ranking)]
    table = pq.read_table(file, columns=names)
    return Ranking(**{name: table[name].to_numpy() for name in names})


def read_document(file: Path, number: int) -> Row:
    """Reads one document of a part by its number; IndexError if there is none."""
    with pq.ParquetFile(file) as table:
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if number < rows:
                part = table.read_row_group(group, columns=_COLUMNS)
                return Row(**part.slice(number, 1).to_pylist()[0])
            number -= rows
    raise IndexError(number)
