"""Reads rows of a data folder's Parquet shards in place, one row group at a time, without a second copy on disk."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from m6.data.manifest import MANIFEST_NAME, Manifest, Shard, SplitEntry
from m6.data.order import OPEN_BLOCKS
from m6.data.verification import verify_shards
from m6.errors import UserError
from m6.files import reading

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("image", pa.binary()),
        pa.field("question", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("context", pa.string()),
        pa.field("group", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
    ]
)
"""The columns of a shard."""

# For a split up to this size all checksums are verified when it is opened. This takes seconds, once per machine. For a
# larger split, the checksum of a page is verified whenever the page is read; "m6 data verify" verifies everything.
VERIFIED_AT_ONCE_BYTES = 1 << 30
CACHE_BYTES = 112 << 20  # more than the open row groups of one large source on one rank, or of two sources on two ranks


class BlockCache:
    """An LRU cache of row groups, bounded in bytes. Several splits can share it."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._blocks: collections.OrderedDict[tuple[Any, ...], pa.Table] = collections.OrderedDict()
        self._bytes = 0

    def get(self, key: tuple[Any, ...], read: Callable[[], pa.Table]) -> pa.Table:
        """Returns the row group with this key. If it is not in memory, ``read`` reads it."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        table = read()
        self._blocks[key] = table
        self._bytes += table.nbytes
        while self._bytes > self._max_bytes and len(self._blocks) > 1:
            self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        pa.default_memory_pool().release_unused()  # buffers of the read, and dropped row groups
        return table


class Rows(Sequence[dict[str, Any]]):
    """The rows of some shards, as dictionaries.

    Reading a row reads its row group. Up to ``OPEN_BLOCKS`` row groups of a split all stay in memory. Row groups of a
    larger split go through ``cache``: neighbouring rows are cheap there, random rows expensive. Iteration and
    ``column`` read one row group after the other and keep none.

    Args:
        folder: the folder of the shards.
        shards: the shards, in the order of the rows.
        columns: the columns to read.
        cache: cache of row groups for a large split.

    Attributes:
        columns: as given.
        shards: as given.
        block_sizes: rows of each row group, int64.

    Raises:
        UserError: a shard is missing or damaged. Damage may also be found later, when rows are read.
        StorageError: a shard cannot be read, now or later.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Shard], columns: Sequence[str], cache: BlockCache | None = None
    ) -> None:
        self.columns = list(columns)
        self.shards = list(shards)
        self._folder = folder
        self._cache = cache or BlockCache()
        self._kept: dict[int, pa.Table] = {}
        groups = [row_groups(folder, shard) for shard in self.shards]
        self._first_blocks = np.cumsum([0, *map(len, groups)])
        self.block_sizes = np.array([rows for group in groups for rows in group], np.int64)
        self._ends = np.cumsum(self.block_sizes)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, row: int) -> dict[str, Any]:  # type: ignore[override]  # no slices
        if not 0 <= row < len(self):
            raise IndexError(row)
        block = int(np.searchsorted(self._ends, row, "right"))
        offset = row - int(self._ends[block] - self.block_sizes[block])
        table = self._block(block)
        return {name: column[offset].as_py() for name, column in zip(self.columns, table.columns, strict=True)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in range(len(self._ends)):
            yield from self._read(block).to_pylist()

    def column(self, name: str) -> list[Any]:
        """Returns all values of one column."""
        only = self.select([name])
        return [value for block in range(len(self._ends)) for value in only._read(block).column(0).to_pylist()]

    def near(self, row: int, rng: np.random.Generator) -> int:
        """Returns a random row of the split; if the split is too large for memory, a row of the same row group."""
        if len(self._ends) <= OPEN_BLOCKS:
            return int(rng.integers(len(self)))
        block = int(np.searchsorted(self._ends, row, "right"))
        return int(rng.integers(self._ends[block] - self.block_sizes[block], self._ends[block]))

    def select(self, columns: Sequence[str]) -> Rows:
        """Returns the same rows with some of the columns of the shards."""
        return Rows(self._folder, self.shards, columns, self._cache)

    def _block(self, block: int) -> pa.Table:
        if len(self._ends) <= OPEN_BLOCKS:
            if block not in self._kept:
                self._kept[block] = self._read(block)
                pa.default_memory_pool().release_unused()  # buffers of the read
            return self._kept[block]
        key = (self._folder, self.shards[0].file, block, *self.columns)
        return self._cache.get(key, lambda: self._read(block))

    def _read(self, block: int) -> pa.Table:
        number = int(np.searchsorted(self._first_blocks, block, "right")) - 1
        shard, group = self.shards[number], block - int(self._first_blocks[number])
        path, rows = self._folder / shard.file, int(self.block_sizes[block])
        with _open(self._folder, shard) as file, _naming_damage(path, f"row group {group}: "):
            # Columns missing in older shards are null.
            present = [name for name in self.columns if name in file.schema_arrow.names]
            table = file.read_row_group(group, columns=present, use_threads=False)
        if len(table) != rows:
            raise _damaged(path, f"row group {group} has {len(table)} rows, expected {rows}")
        for field in (SCHEMA.field(name) for name in self.columns if name in SCHEMA.names):
            if problem := _problem_of(field, table):
                raise _damaged(path, f"its column {field.name} {problem}")
        for name in self.columns:
            if name not in present:
                table = table.append_column(name, pa.nulls(rows))
        return table.select(self.columns)


def open_split(
    manifest: Manifest,
    source: str,
    split: str,
    columns: Sequence[str] = tuple(SCHEMA.names),
    cache: BlockCache | None = None,
) -> Rows:
    """Opens the rows of one split in the order of its shards.

    Args:
        manifest: manifest of the data folder.
        source: name of the source.
        split: name of the split.
        columns: the columns of ``SCHEMA`` to read.
        cache: cache of row groups for a large split.

    Raises:
        UserError: the source or split is unknown or has no rows, or a shard is missing or damaged.
        StorageError: a shard cannot be read.
    """
    entry = manifest.split(source, split)
    if not entry.rows:
        raise UserError(f'{manifest.folder}: source "{source}" has no rows in split "{split}"')
    return open_shards(manifest.folder, entry, columns, cache)


def open_shards(folder: Path, entry: SplitEntry, columns: Sequence[str], cache: BlockCache | None = None) -> Rows:
    """Opens shards. Their checksums are verified first, unless the split is very large.

    Raises:
        UserError: a shard is missing or damaged.
        StorageError: a shard cannot be read.
    """
    if entry.bytes <= VERIFIED_AT_ONCE_BYTES:
        verify_shards(folder, entry.shards)
    return Rows(folder, entry.shards, columns, cache)


def open_sources(manifest: Manifest, sources: Sequence[str], split: str, columns: Sequence[str]) -> Rows:
    """Opens one split of several sources, one after the other. Sources without rows in the split are left out."""
    shards = []
    for source in sources:
        if manifest.split(source, split).rows:
            shards += open_split(manifest, source, split).shards
    return Rows(manifest.folder, shards, columns)


def row_groups(folder: Path, shard: Shard) -> list[int]:
    """Returns the number of rows of each row group of a shard, from the manifest or, in older folders, the file.

    Raises:
        UserError: the shard is missing or damaged, or its number of rows differs from the manifest.
        StorageError: the shard cannot be read.
    """
    if shard.row_groups is not None:
        return shard.row_groups
    with _open(folder, shard) as file:
        groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    # Detects shards replaced without their manifest.
    if sum(groups) != shard.rows:
        raise UserError(f"{folder / shard.file} has {sum(groups)} rows, but {MANIFEST_NAME} says {shard.rows}")
    return groups


def _open(folder: Path, shard: Shard) -> pq.ParquetFile:
    path = folder / shard.file
    with _naming_damage(path):
        if (size := os.path.getsize(path)) != shard.bytes:
            raise _damaged(path, f"it has {size} bytes, expected {shard.bytes}")
        # pre_buffer joins the reads of neighbouring columns: a few large reads are fastest on a shared file system.
        return pq.ParquetFile(path, pre_buffer=True, page_checksum_verification=True)


@contextlib.contextmanager
def _naming_damage(path: Path, part: str = "") -> Iterator[None]:
    """Turns pyarrow's errors into a UserError about ``path``, and file system errors into a StorageError."""
    try:
        with reading(path):
            yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing, but {MANIFEST_NAME} lists it") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, f"{part}{error}") from None


def _problem_of(field: pa.Field, table: pa.Table) -> str | None:
    """How a column of a shard differs from its field of ``SCHEMA``; a column that may be null may also be missing."""
    if field.name not in table.schema.names:
        return None if field.nullable else "is missing"
    column = table[field.name]
    if column.type != field.type:
        return f"is of {column.type}, expected {field.type}"
    return "has no value in some rows" if column.null_count and not field.nullable else None


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason.splitlines()[0] if reason else 'it cannot be read'}")
