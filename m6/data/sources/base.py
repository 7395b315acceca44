"""What a source is: a name, a kind, its origin, and a stream of rows."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from m6.data.manifest import Origin, SourceKind, Split

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the source has it. The build checks and converts it, and chooses the split.

    ``group`` is the document or concept: rows of one group always land in one split. ``split`` is set only
    where the source comes with its own split. ``image`` holds the bytes of a picture file (SVG included).
    ``problem`` is why the row cannot be used, where only the source can tell.
    """

    id: str
    group: str
    text: str = ""
    image: bytes | None = None
    question: str | None = None
    answer: str | None = None
    split: Split | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What the command line says to the sources; the columns and the licence concern the user's own data."""

    cache: Path
    passage_chars: int = 256
    text_column: str = "text"
    image_column: str | None = None
    label_column: str | None = None
    licence: str | None = None


class Source(Protocol):
    """A named stream of rows, in an order that never changes for the same origin.

    ``has_test_split``: the rows that carry no split are divided between train and validation only.
    """

    name: str
    kind: SourceKind
    has_test_split: bool

    def origin(self) -> list[Origin]: ...

    def rows(self) -> Iterator[Row]: ...


def interleave(*parts: Sequence[T]) -> Iterator[T]:
    """Merges sequences evenly, so that a limited build takes the same share of each."""

    def placed(number: int, part: Sequence[T]) -> Iterator[tuple[float, int, T]]:
        return (((index + 0.5) / len(part), number, item) for index, item in enumerate(part))

    merged = heapq.merge(*(placed(n, p) for n, p in enumerate(parts)), key=lambda entry: entry[:2])
    return (item for _, _, item in merged)
