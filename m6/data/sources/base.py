"""The interface of a source: a name, a kind, its origin, and a stream of rows."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from m6.data.manifest import Origin, SourceKind, Split

T = TypeVar("T")
_KINDS_UNREAD = 100  # most kinds counted separately: each member may have its own kind of name


def count_unread(counts: Counter[str], unread: Iterable[tuple[str, int]]) -> None:
    """Adds numbers of ignored members by kind. The number of kinds is bounded; further kinds count as "others"."""
    for kind, number in unread:
        counts[kind if kind in counts or len(counts) < _KINDS_UNREAD else "others"] += number


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source. The build checks and converts it, and assigns its split.

    Attributes:
        id: identifier, unique in the source.
        group: document or concept; all rows of a group are in the same split. None: the build groups rows with equal
            captions and with equal or similar images.
        text: caption, passage or document.
        image: contents of an image file (SVG is allowed).
        question: question about the image.
        answer: answer to the question, or label of the text.
        context: context of a labelled text, such as the article of a headline.
        split: set only if the source defines its own split.
        problem: why the row is unusable, if the source itself found a problem.
        cut: whether a labelled text or its context was cut to the length of a passage; the build counts such rows.
        unread: kinds of ignored members of the row, such as ".seg.png", with their numbers; the build counts them.
    """

    id: str
    group: str | None
    text: str = ""
    image: bytes | None = None
    question: str | None = None
    answer: str | None = None
    context: str | None = None
    split: Split | None = None
    problem: str | None = None
    cut: bool = False
    unread: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Options from the command line. Columns and licence apply only to the user's own data.

    Attributes:
        cache: folder for fetched packages.
        passage_chars: longest passage in characters; documents are cut into passages.
        text_column: column of texts or captions.
        image_column: column of images; None: ``image`` if it exists.
        question_column: column of questions about images; if given, they are read instead of texts.
        label_column: column of labels for classification, or of the answers to the questions.
        context_column: column of contexts of labelled texts, such as the article of a headline.
        split_column: column of split names.
        group_column: column of groups, such as a photographer or a dish; rows of a group are in one split.
        licence: licence of the user's data.
        licences: licences of single sources, by name; they take precedence over ``licence``.
    """

    cache: Path
    passage_chars: int = 256
    text_column: str = "text"
    image_column: str | None = None
    question_column: str | None = None
    label_column: str | None = None
    context_column: str | None = None
    split_column: str | None = None
    group_column: str | None = None
    licence: str | None = None
    licences: Mapping[str, str] = field(default_factory=dict)

    @property
    def written_column(self) -> str:
        """The column of texts about an image: questions if given, else captions."""
        return self.question_column or self.text_column

    def columns(self) -> dict[str, str]:
        """Returns the chosen columns by role: "text", and "image", "label" and so on if given."""
        chosen = {
            "text": None if self.question_column else self.text_column,
            "question": self.question_column,
            "image": self.image_column,
            "label": self.label_column,
            "context": self.context_column,
            "split": self.split_column,
            "group": self.group_column,
        }
        return {role: column for role, column in chosen.items() if column is not None}


class Source(Protocol):
    """A named stream of rows. The same origin always gives the same rows in the same order.

    Attributes:
        name: name in the manifest and in file names.
        kind: kind of the rows.
        own_splits: the splits defined by the source itself. They are kept as they are. Of its other rows, rows of a
            held-out group are held out too; its training rows give a validation split if it has none.
    """

    name: str
    kind: SourceKind
    own_splits: frozenset[Split]

    def origin(self) -> list[Origin]:
        """Returns the packages or files of the rows, with versions, licences and checksums."""

    def rows(self) -> Iterator[Row]:
        """Yields the rows."""


def interleave(*parts: Sequence[T]) -> Iterator[T]:
    """Merges sequences evenly: any prefix of the result contains about the same share of each sequence.

    A build with ``--limit`` reads such a prefix.
    """

    def with_positions(number: int, part: Sequence[T]) -> Iterator[tuple[float, int, T]]:
        return (((index + 0.5) / len(part), number, item) for index, item in enumerate(part))

    # The sequence's number breaks ties, so items are never compared.
    merged = heapq.merge(*(with_positions(n, p) for n, p in enumerate(parts)), key=lambda entry: entry[:2])
    return (item for _, _, item in merged)
