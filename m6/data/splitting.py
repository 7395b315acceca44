"""Which split a row goes to: rows that belong together are in one split, so nothing of a test is seen in training."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from m6.data.manifest import Split
from m6.data.overlap import MAX_COMPARED, connected, join_near_duplicates, signature
from m6.data.shards import ShardWriter
from m6.data.sources import Row
from m6.data.sources.text import text_key

_COLUMNS = ("id", "group", "text", "image", "question", "answer", "context")  # what a waiting row keeps
# A row without a split goes where rows of its group are that have one: to the first of these.
_FOLLOWED: tuple[Split, ...] = ("test", "validation", "train")


@dataclass(frozen=True)
class SplitRules:
    """How the rows of a source are divided.

    Attributes:
        validation_share: share of the groups in the validation split.
        test_share: share of the groups in the test split.
        own: the splits that the source defines itself, which are kept as they are.
    """

    validation_share: float
    test_share: float
    own: frozenset[Split] = frozenset()

    def split(self, group: str, named: Split | None) -> Split:
        """Returns the split of a row with a group and perhaps a split of its own."""
        # Training rows of a source without validation rows give some: training needs a validation loss.
        if named is not None and not (named == "train" and self.own and "validation" not in self.own):
            return named
        return assign_split(group, self.validation_share, 0.0 if self.own else self.test_share)


@dataclass
class Grouping:
    """What became of rows without a group of their own.

    Attributes:
        groups: number of groups.
        rows: number of rows in them.
    """

    groups: int = 0
    rows: int = 0


def assign_split(group: str, validation_share: float, test_share: float) -> Split:
    """Returns the split of a group. It depends on the group's name alone, never on other rows.

    The first 8 bytes of the name's SHA-256 are taken as a number in [0, 1): numbers below ``test_share`` are test,
    the next ``validation_share`` are validation, the rest is training. A larger share of validation therefore only
    moves groups out of training.
    """
    position = _key(group) / 2**64
    if position < test_share:
        return "test"
    return "validation" if position < test_share + validation_share else "train"


def _key(group: str) -> int:
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8], "big")


def split_rows(
    rows: Iterable[Row], source: str, spool: Path, rules: SplitRules, grouping: Grouping
) -> Iterator[tuple[Row, Split]]:
    """Assigns a group and a split to each row.

    Rows with a group go on at once. Rows without one are kept in a folder until all have been seen: each is grouped
    with those that have the same caption, the same picture or nearly the same picture. Of a source with splits of its
    own, rows without a split are kept too: they follow the other rows of their group.

    Args:
        rows: checked rows of one source; pictures are converted.
        source: name of the source.
        spool: folder for rows that wait; the caller removes it.
        rules: shares and own splits.
        grouping: filled with what became of the rows without a group.

    Yields:
        Rows with a group, and their split.
    """
    texts: list[bytes | None] = []
    pictures: list[bytes] = []
    signatures: list[NDArray[np.uint8]] = []
    named: list[Split | None] = []
    own = {split: array("Q") for split in _FOLLOWED}  # keys of the groups, 8 bytes for each row
    followers = array("Q")
    with ShardWriter(spool, "grouped", source) as grouped, ShardWriter(spool, "ungrouped", source) as ungrouped:
        for row in rows:
            if row.group is None:
                assert row.image is not None  # sources group their texts themselves
                # A caption that is a label is shared by all pictures of a class, which must be in every split.
                texts.append(None if row.answer else text_key(row.text))
                pictures.append(hashlib.sha256(row.image).digest())
                if len(signatures) <= MAX_COMPARED:
                    signatures.append(signature(row.image))
                named.append(row.split)
                ungrouped.write(_stored(row, source))
            elif row.split is None and rules.own:
                followers.append(_key(row.group))
                grouped.write(_stored(row, source))
            else:
                if row.split is not None:
                    own[row.split].append(_key(row.group))
                yield row, rules.split(row.group, row.split)
    followed = {split: np.isin(followers, keys) for split, keys in own.items()}
    for number, row in enumerate(_read(spool, grouped)):
        assert row.group is not None
        first = next((split for split, found in followed.items() if found[number]), None)
        yield row, rules.split(row.group, first)
    if not texts:
        return
    roots = _joined(texts, pictures, np.stack(signatures))
    # A name of its contents, so that it does not depend on names of files: the least key of its rows.
    names: dict[int, bytes] = {}
    for root, key in zip(roots, pictures, strict=True):
        names[root] = min(names.get(root, key), key)
    grouping.groups, grouping.rows = len(names), len(roots)
    splits = _splits_of_groups(roots, named)
    for row, root, split in zip(_read(spool, ungrouped), roots, named, strict=True):
        first = split or next((each for each in _FOLLOWED if each in splits[root]), None)
        group = f"content/{names[root].hex()[:32]}"
        yield dataclasses.replace(row, group=group), rules.split(group, first)


def _joined(texts: list[bytes | None], pictures: list[bytes], signatures: NDArray[np.uint8]) -> list[int]:
    """Returns the least row of each row's group: rows with an equal text or picture, or near duplicates, are joined."""
    pairs: list[tuple[int, int]] = []
    for keys in (texts, pictures):
        seen: dict[bytes, int] = {}
        for row, key in enumerate(keys):
            if key is not None and (first := seen.setdefault(key, row)) != row:
                pairs.append((row, first))
    groups = connected(pairs, len(texts))
    if len(signatures) <= MAX_COMPARED:
        groups = join_near_duplicates(signatures, groups)
    return groups.tolist()


def _splits_of_groups(roots: list[int], named: list[Split | None]) -> dict[int, set[Split]]:
    splits: dict[int, set[Split]] = collections.defaultdict(set)
    for root, own in zip(roots, named, strict=True):
        if own is not None:
            splits[root].add(own)
    return splits


def _stored(row: Row, source: str) -> dict[str, object]:
    return {name: getattr(row, name) for name in _COLUMNS} | {"group": row.group or "", "source": source}


def _read(spool: Path, writer: ShardWriter) -> Iterator[Row]:
    for shard in writer.shards:
        for batch in pq.ParquetFile(spool / shard.file).iter_batches(batch_size=256):
            for values in batch.to_pylist():
                yield Row(**{name: values[name] for name in _COLUMNS})
