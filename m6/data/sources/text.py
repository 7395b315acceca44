"""Cleans and compares texts, and cuts documents into passages."""

import hashlib
import re
from collections.abc import Iterator

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2060\ufeff\ufffe\uffff]")
_SPACE = re.compile(r"[ \t\xa0\u2000-\u200a\u3000]+")
_BREAK = re.compile(r" ?\n[ \n]*")
# A sentence ends after its final punctuation and any closing quotes or brackets, or at a line break.
_SENTENCE = re.compile(r"[^。！？!?；;…\n]*(?:[。！？!?；;…]+[”’」』）)\]]*|\n|$)")


def clean(text: str) -> str:
    """Removes control characters, invisible characters and lone surrogates; collapses blanks and line breaks."""
    text = text.encode("utf-8", "ignore").decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    text = _SPACE.sub(" ", _CONTROL.sub("", text))
    return _BREAK.sub("\n", text).strip()


def text_key(text: str) -> bytes:
    """Returns a digest of a text. Case and blanks do not count; digits and punctuation do: 3 点 is not 5 点."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode("utf-8", "surrogatepass")).digest()


def passages(document: str, limit: int) -> Iterator[str]:
    """Cuts a document at sentence ends into passages of at most ``limit`` characters.

    Sentences are packed greedily. A sentence longer than the limit is cut after the last comma, colon or space within
    the limit, or else at the limit. Passages without a letter or digit are left out.
    """
    passage = ""
    for match in _SENTENCE.finditer(clean(document)):
        sentence = match[0]
        if len(passage) + len(sentence.rstrip()) > limit:
            yield from _unless_only_marks(passage)
            passage = ""
        # Works on positions: shortening the text at each cut would copy it, quadratic for a text without sentence ends.
        begin, end = 0, len(sentence.rstrip())
        while end - begin > limit:
            last = max(sentence.rfind(mark, begin, begin + limit) for mark in "，,、：: ")
            cut = last + 1 if last >= 0 else begin + limit
            yield from _unless_only_marks(sentence[begin:cut])
            begin = cut
        passage += sentence[begin:]
    yield from _unless_only_marks(passage)


def _unless_only_marks(passage: str) -> Iterator[str]:
    if re.search(r"\w", passage):
        yield passage.strip()
