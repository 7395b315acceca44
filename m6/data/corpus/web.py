"""Reads web archives: the pages of WARC files, of which the main text is extracted, and the texts of WET files.

The format is ISO 28500. A page is limited by its size and not by the seconds that it takes, so that the result is the
same on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warcio.recordloader import ArcWarcRecord

MAX_RECORD_BYTES = 4 << 20
_CHUNK = 1 << 16
_PAGES = ("text/html", "application/xhtml+xml")


def read_archive(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yields the text of each page of an archive, and the reason if there is none.

    Records that hold no page, such as requests and pictures, are passed over. A file that ends inside of a record's
    header cannot be told from a complete one.

    Args:
        path: a WARC or WET file, also compressed by gzip record by record.

    Raises:
        OSError, EOFError, ValueError, zlib.error: the rest of the file cannot be read.
    """
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    with path.open("rb") as file:
        records = ArchiveIterator(file)
        try:
            for record in records:
                if (kind := _kind(record)) is None:
                    continue
                found = _text(record, kind)
                while record.raw_stream.read(_CHUNK):  # what is beyond the limit, or follows the page
                    pass
                if getattr(record.raw_stream, "limit", 0):
                    raise ValueError("the last record is cut off")
                yield found
        except ArchiveLoadFailed as error:
            raise ValueError(str(error)) from None


def _kind(record: ArcWarcRecord) -> str | None:
    """Returns "text" for the record of a WET file, "page" for one of a WARC file, None for what is neither."""
    if record.rec_type == "conversion":
        return "text"
    if record.rec_type != "response" or record.http_headers is None:
        return None
    # What the crawler found out; else what the server said.
    declared = record.rec_headers.get_header("WARC-Identified-Payload-Type")
    declared = declared or record.http_headers.get_header("Content-Type", "")
    if record.http_headers.get_statuscode() not in ("", "200"):
        return None
    return "page" if declared.partition(";")[0].strip().lower() in _PAGES else None


def _text(record: ArcWarcRecord, kind: str) -> tuple[str, str | None]:
    # One byte more than is allowed: a page that unpacks to gigabytes is not read to its end.
    content = record.content_stream().read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        return "", "page too large"
    if kind == "text":
        try:
            return content.decode("utf-8"), None
        except UnicodeDecodeError:
            return "", "not UTF-8"
    from trafilatura import extract

    # Without its memory of earlier pages: a text must not depend on what else a task reads.
    text = extract(content, favor_precision=True, include_comments=False, deduplicate=False)
    return text or "", None if text else "no main text"
