"""The forms of a text: how it is stored, and how it is compared with others."""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Callable

from m6.errors import UserError

CHINESE = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters, for a class of a regular expression: the blocks of unified and compatibility ideographs."""

# Full-width digits and letters: without them numbers are hard to find. Marks keep their width, which Chinese needs.
_NARROW = {code: code - 0xFEE0 for first, last in ("０９", "ＡＺ", "ａｚ") for code in range(ord(first), ord(last) + 1)}
_WIDE = re.compile("[０-９Ａ-Ｚａ-ｚ]")
_BLANK = re.compile(r"\s+")
_MARKS = re.compile(r"[\W_]+")


@functools.cache
def _to_simplified() -> Callable[[str], str]:
    try:
        from opencc import OpenCC
    except ImportError:
        raise UserError('simplified characters need opencc: pip install "m6-recipes[corpus]"') from None
    convert: Callable[[str], str] = OpenCC("t2s").convert
    return convert


def stored_form(text: str, to_simplified: bool) -> str:
    """Returns the text as it is stored: Unicode's composed form (NFC), with digits and letters of normal width."""
    text = unicodedata.normalize("NFC", text)
    if _WIDE.search(text):  # few texts have any, and a search is much faster
        text = text.translate(_NARROW)
    return _to_simplified()(text) if to_simplified else text


def compared_form(text: str) -> str:
    """Returns the text as it is compared: compatibility form (NFKC), simplified, small letters, without blanks."""
    return _BLANK.sub("", _to_simplified()(unicodedata.normalize("NFKC", text)).casefold())


def without_marks(compared: str) -> str:
    """Returns the letters and digits of a text in its compared form."""
    return _MARKS.sub("", compared)


def digest(text: str) -> int:
    """Returns the first 64 bits of the text's SHA-256. Two of 10^8 texts are equal in them with a chance of 3e-4."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "little")
