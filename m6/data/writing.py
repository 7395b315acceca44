"""Writes the rows of a source to the shards of its splits, and describes them for the manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from m6.data.manifest import SPLITS, Origin, SourceEntry, SourceKind, Split, SplitEntry
from m6.data.overlap import Contents
from m6.data.shards import ShardWriter
from m6.data.sources.base import Row

_COLUMNS = ("id", "text", "image", "question", "answer", "context", "group")


class SplitWriters:
    """Writes the rows of one source, and remembers what each split holds.

    Use it as a context manager. On exit, ``splits`` has the shards of each split.

    Args:
        folder: the data folder.
        source: name of the source, which each row names.
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
    """Returns the manifest's entry of a source, with what its held-out splits share with training.

    Args:
        kind: which columns the rows have.
        own_splits: the splits that the source defines itself.
        origin: what it was read from.
        splits: the shards of all splits; ``shared`` is counted here.
        contents: what each split holds; of training at least what the others share with it.
        groups: number of groups of all splits.
        skipped: rows that were left out, by reason.
        unread: what of the rows is not read, by kind.
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
