"""Assigns rows to splits. Related rows are in one split, so training sees nothing of the test split."""

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

_COLUMNS = ("id", "group", "text", "image", "question", "answer", "context")  # columns of a waiting row
# A row without a split follows the rows of its group with a split: to the first of these splits.
_FOLLOWED: tuple[Split, ...] = ("test", "validation", "train")


@dataclass(frozen=True)
class SplitRules:
    """Rules for the splits of a source.

    Attributes:
        validation_share: share of the groups in the validation split.
        test_share: share of the groups in the test split.
        own: the splits defined by the source itself; they are kept as they are.
    """

    validation_share: float
    test_share: float
    own: frozenset[Split] = frozenset()

    def split(self, group: str, named: Split | None) -> Split:
        """Returns the split of a row, by its group and its own split, if any."""
        # If the source has no validation split, some of its training rows go there: training needs a validation loss.
        if named is not None and not (named == "train" and self.own and "validation" not in self.own):
            return named
        return assign_split(group, self.validation_share, 0.0 if self.own else self.test_share)


@dataclass
class Grouping:
    """Counts of rows without their own group.

    Attributes:
        groups: number of groups made for them.
        rows: number of these rows.
    """

    groups: int = 0
    rows: int = 0


def assign_split(group: str, validation_share: float, test_share: float) -> Split:
    """Returns the split of a group. It depends only on the group's name, not on other rows.

    The first 8 bytes of the name's SHA-256 give a number in [0, 1): numbers below ``test_share`` are test, the next
    ``validation_share`` are validation, the rest is training. So a larger validation share only moves groups out of
    training.
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

    Rows with a group are yielded at once. Rows without a group wait in a folder until all rows are read. Then rows with
    equal captions, and rows with equal or similar images, are grouped. If the source has its own splits, rows without
    a split wait too: they follow the other rows of their group.

    Args:
        rows: checked rows of one source; images are converted.
        source: name of the source.
        spool: folder for waiting rows; the caller removes it.
        rules: shares and own splits.
        grouping: receives the counts of rows without a group.

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
                # In a labelled row the caption is no key: all images of a class may share it, and every split needs
                # the class.
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
    # A group is named by the least image key of its rows: independent of file names.
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
    """Joins rows with equal texts, equal images or near duplicates. Returns the least row of each row's group."""
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
