"""Checks one row of a source: cleans its text, converts its image, and gives the reason if it is unusable."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

from m6.data.manifest import SourceKind
from m6.data.sources.base import Row
from m6.data.sources.pictures import BadPicture, encode
from m6.data.sources.text import clean

# Unicode normalisation sorts combining marks in quadratic time: 100,000 in a row take 8 s. Real texts have few.
_MAX_MARKS = 1000
_NO_LETTERS = re.compile(r"[^\w\s]+")


def check_row(row: Row, kind: SourceKind, *, max_chars: int, image_size: int = 64) -> tuple[Row, str | None]:
    """Cleans the text of a row and converts its image.

    Args:
        row: a row of a source.
        kind: kind of the source.
        max_chars: longest text in characters.
        image_size: longest side of the converted image in pixels.

    Returns:
        The converted row, and the reason if it is unusable; else None.
    """
    # File names may contain bytes outside UTF-8. Neither Parquet nor JSON can write them.
    group = None if row.group is None else _printable(row.group)
    row = dataclasses.replace(row, id=_printable(row.id), group=group)
    if row.problem:
        return row, row.problem
    row = dataclasses.replace(
        row,
        text=clean(row.text),
        question=_clean_or_none(row.question),
        answer=_clean_or_none(row.answer),
        context=_clean_or_none(row.context),
    )
    needed = {"no question": row.question, "no answer": row.answer} if kind == "vqa" else {"empty text": row.text}
    for problem, text in needed.items():
        if not text:
            return row, problem
    if len(row.text) > max_chars:
        return row, "text too long"
    if _has_many_marks(row.text):
        return row, f"more than {_MAX_MARKS} combining marks in a row"
    if kind == "labelled_text" and not row.answer:
        return row, "no label"
    if kind in ("text", "labelled_text"):
        return row, None
    if row.image is None:
        return row, "missing image"
    try:
        return dataclasses.replace(row, image=encode(row.image, image_size)), None
    except BadPicture as problem:
        return row, str(problem)


def _has_many_marks(text: str) -> bool:
    runs = (run for run in _NO_LETTERS.findall(text) if len(run) > _MAX_MARKS) if len(text) > _MAX_MARKS else ()
    return any(sum(unicodedata.combining(char) > 0 for char in run) > _MAX_MARKS for run in runs)


def _clean_or_none(text: str | None) -> str | None:
    return None if text is None else clean(text)


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")
