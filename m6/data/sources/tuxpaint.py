"""Tux Paint's stamps: photographs and drawings, each with a Chinese sentence written by a translator."""

import re
from collections.abc import Iterator

from m6.data.manifest import Origin, SourceKind, Split
from m6.data.sources.base import Row, SourceOptions
from m6.data.sources.packages import DebianPackage

PACKAGE = DebianPackage("tuxpaint-stamps-default", "GPL-2.0-only")
STAMPS = r"\./usr/share/tuxpaint/stamps/(.+)\.(png|svg|txt)"

_SENTENCE = re.compile(r"^zh_CN\.utf8=(.+)$", re.MULTILINE)


class TuxPaint:
    """One row for each stamp with a Chinese sentence. The group is the sentence."""

    name = "tuxpaint"
    kind: SourceKind = "image_text"
    own_splits: frozenset[Split] = frozenset()

    def __init__(self, options: SourceOptions) -> None:
        self._cache = options.cache

    def origin(self) -> list[Origin]:
        """Returns the package in the version of the machine's mirror."""
        return [PACKAGE.origin(self._cache)]

    def rows(self) -> Iterator[Row]:
        """Yields the stamps in the order of the package."""
        # The archive holds a stamp's text file right after its image.
        last: tuple[str, bytes] = ("", b"")
        for match, content in PACKAGE.members(self._cache, STAMPS):
            if match[2] != "txt":
                last = (match[1], content)
                continue
            sentence = _SENTENCE.search(content.decode("utf-8", "replace"))
            if sentence and last[0] == match[1]:
                yield Row(f"tuxpaint/{match[1]}", sentence[1], sentence[1], last[1])
