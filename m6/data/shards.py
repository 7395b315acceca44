"""Writes rows as Parquet shards of bounded size, in bounded memory.

Also describes the written splits of a source for the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from m6 import files
from m6.data.manifest import SPLITS, Origin, Shard, SourceEntry, SourceKind, Split, SplitEntry
from m6.data.overlap import Contents
from m6.data.reader import SCHEMA
from m6.data.sources.base import Row

SHARD_BYTES = 64 << 20
# A reader keeps tens of row groups in memory, see m6/data/order.py. Larger row groups hardly compress better.
ROW_GROUP_BYTES = 1 << 20
ROW_GROUP_ROWS = 10_000


class ShardWriter:
    """Writes one split of one source to ``folder/split/source-00000.parquet`` and so on.

    Use it as a context manager. A shard is written under a temporary name and renamed when complete. On exit,
    ``shards`` lists the written shards in order. Without rows, no file is written.

    Args:
        folder: the data folder.
        split: name of the split.
        source: name of the source.
        shard_bytes: a shard ends at this size, exceeded by less than one row group.
    """

    def __init__(self, folder: Path, split: str, source: str, shard_bytes: int = SHARD_BYTES) -> None:
        self.shards: list[Shard] = []
        self._folder, self._split, self._source = folder, split, source
        self._shard_bytes = shard_bytes
        self._rows: list[dict[str, object]] = []
        self._pending_bytes = 0
        self._writer: pq.ParquetWriter | None = None
        self._file: pa.NativeFile | None = None
        self._row_groups: list[int] = []

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
            self._finish_shard()
        elif self._writer is not None and self._file is not None:
            self._writer.close()
            self._file.close()
            self._temporary.unlink()

    def write(self, row: dict[str, object]) -> None:
        """Appends a row. Its keys are columns of SCHEMA; a missing column is null."""
        self._rows.append(row)
        self._pending_bytes += sum(len(v) for v in row.values() if isinstance(v, (str, bytes)))
        if self._pending_bytes >= ROW_GROUP_BYTES or len(self._rows) >= ROW_GROUP_ROWS:
            self._flush()
            if self._file is not None and self._file.tell() >= self._shard_bytes:
                self._finish_shard()

    @property
    def _path(self) -> Path:
        return self._folder / self._split / f"{self._source}-{len(self.shards):05d}.parquet"

    @property
    def _temporary(self) -> Path:
        return self._path.with_name(self._path.name + ".tmp")

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = pa.OSFile(str(self._temporary), "wb")
            # Page checksums for readers: verifying whole files takes too long for a large split.
            self._writer = pq.ParquetWriter(self._file, SCHEMA, compression="zstd", write_page_checksum=True)
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._row_groups.append(len(self._rows))
        self._rows, self._pending_bytes = [], 0

    def _finish_shard(self) -> None:
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.close()
        temporary, path = self._temporary, self._path
        files.sync(temporary)  # before the rename: a file with its final name is complete even after a crash
        os.replace(temporary, path)
        self.shards.append(
            Shard(
                file=path.relative_to(self._folder).as_posix(),
                rows=sum(self._row_groups),
                bytes=path.stat().st_size,
                sha256=files.sha256(path),
                row_groups=self._row_groups,
            )
        )
        self._writer = self._file = None
        self._row_groups = []


_COLUMNS = ("id", "text", "image", "question", "answer", "context", "group")


class SplitWriters:
    """Writes the rows of one source to the shards of its splits, and collects hashes of their contents.

    Use it as a context manager. On exit, ``splits`` lists the shards of each split.

    Args:
        folder: the data folder.
        source: name of the source, written into each row.
        prefix: beginning of the shards' file names; by default the name of the source.
    """

    def __init__(self, folder: Path, source: str, prefix: str | None = None) -> None:
        self._source = source
        self._stack = ExitStack()
        self._writers = {split: ShardWriter(folder, split, prefix or source) for split in SPLITS}
        self.contents = {split: Contents() for split in SPLITS}

    def __enter__(self) -> SplitWriters:
        for writer in self._writers.values():
            self._stack.enter_context(writer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def write(self, row: Row, split: Split) -> None:
        """Appends a checked row with a group to a split."""
        assert row.group is not None
        self._writers[split].write({name: getattr(row, name) for name in _COLUMNS} | {"source": self._source})
        self.contents[split].add(row.group, row.text, row.image, row.answer)

    @property
    def splits(self) -> dict[Split, SplitEntry]:
        """The shards of each split."""
        return {split: SplitEntry.of(writer.shards) for split, writer in self._writers.items()}


def describe_source(
    kind: SourceKind,
    own_splits: Collection[Split],
    origin: list[Origin],
    splits: dict[Split, SplitEntry],
    contents: Mapping[Split, Contents],
    groups: int,
    skipped: Mapping[str, int],
    unread: Mapping[str, int],
) -> SourceEntry:
    """Returns the manifest's entry of a source, and counts the overlap of its held-out splits with training.

    Args:
        kind: kind of the rows.
        own_splits: the splits defined by the source itself.
        origin: origins of the rows.
        splits: the shards of all splits; ``shared`` is counted here.
        contents: hashes of each split; for training, at least the hashes in common with held-out splits.
        groups: number of groups of all splits.
        skipped: numbers of skipped rows by reason.
        unread: numbers of ignored members of rows by kind.
    """
    for split in ("validation", "test"):
        if splits[split].rows:
            splits[split].shared = contents[split].count_shared(contents["train"])
    return SourceEntry(
        kind=kind,
        licence=" AND ".join(dict.fromkeys(each.licence for each in origin)),
        origin=origin,
        own_splits=[split for split in SPLITS if split in own_splits],
        groups=groups,
        splits=splits,
        skipped=_sorted(skipped),
        unread=_sorted(unread) or None,
    )


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda entry: -entry[1]))
