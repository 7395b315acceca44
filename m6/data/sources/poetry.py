"""Classical Chinese poetry, about 330,000 poems, in simplified characters."""

import json
import re
from collections.abc import Iterator
from typing import Any

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.packages import NpmPackage, members
from m6.data.sources.text import passages
from m6.errors import UserError

PACKAGE = NpmPackage(
    "chinese-poetry",
    "2.0.1",
    "MIT",
    "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86",
)
# Tang and Song poems, ci, Yuan songs, the Five Dynasties, the Book of Songs, the songs of Chu, Cao Cao and Nalan
# Xingde. The other files of the package are repetitions or commentary.
FILES = (
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
        return [PACKAGE.origin()]

    def rows(self) -> Iterator[Row]:
        """Yields the passages of one poem after the other. UserError if opencc is not installed."""
        try:
            from opencc import OpenCC
        except ImportError:
            raise UserError('simplified characters need opencc: pip install "m6-recipes[data]"') from None
        convert = OpenCC("t2s").convert
        for match, content in members(PACKAGE.tarball(self._cache), FILES):
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
