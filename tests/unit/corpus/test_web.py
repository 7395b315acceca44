"""Pages come out of web archives as text; what is no page is passed over, and what cannot be read is counted."""

import gzip
import io
from pathlib import Path

import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from m6.corpus import reading
from m6.corpus.output import load_record
from m6.corpus.reading import read_archive
from tests.fixtures.corpus import built, own, recipe_of, removed_from, text_of

ARTICLE = "今天早上，公园里的花都开了，许多人带着孩子来看花，草地上有风筝，湖边有人唱歌。"
ADVICE = "老师说，春天是一年的开始，大家应该多读书，多运动，也要多帮助别人，这样生活才有意思。"


def page(*paragraphs: str, charset: str = "utf-8") -> bytes:
    body = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    html = (
        f'<html><head><meta charset="{charset}"><title>春天</title><script>var a = "{ADVICE}";</script></head><body>'
        f"<article><h1>春天来了</h1>{body}</article><footer>版权所有</footer></body></html>"
    )
    return html.encode(charset)


class Archive:
    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._writer = WARCWriter(self._file, gzip=path.suffix == ".gz")

    def add(self, content: bytes, kind="response", mime="text/html", status="200 OK", encoding=None, **headers) -> None:
        own = [("Content-Type", mime), *([("Content-Encoding", encoding)] if encoding else [])]
        http = StatusAndHeaders(status, own, protocol="HTTP/1.1") if kind in ("response", "request") else None
        record = self._writer.create_warc_record(
            "http://example.org/", kind, payload=io.BytesIO(content), http_headers=http, warc_headers_dict=headers
        )
        self._writer.write_record(record)

    def close(self) -> None:
        self._file.close()


@pytest.fixture
def archive(tmp_path):
    return tmp_path / "crawl.warc.gz"


def written(path: Path, *records) -> Path:
    archive = Archive(path)
    for content, options in records:
        archive.add(content, **options)
    archive.close()
    return path


@pytest.mark.parametrize("name", ["crawl.warc", "crawl.warc.gz"])
@pytest.mark.parametrize("charset", ["utf-8", "gb18030"])
def test_the_main_text_of_a_page(tmp_path: Path, name: str, charset: str):
    [(text, problem)] = read_archive(written(tmp_path / name, (page(ARTICLE, ADVICE, charset=charset), {})))
    assert problem is None
    assert ARTICLE in text
    assert ADVICE in text
    assert "版权所有" not in text
    assert "<p>" not in text
    assert "var a" not in text


def test_the_same_page_twice_has_the_same_text(archive: Path):
    first, second = read_archive(written(archive, *[(page(ARTICLE, ADVICE), {})] * 2))
    assert first == second


def test_what_is_no_page_is_passed_over(archive: Path):
    others = [
        (b"GET / HTTP/1.1", {"kind": "request"}),
        (b"a: b", {"kind": "metadata"}),
        (b"\x89PNG", {"mime": "image/png"}),
        (page(ARTICLE), {"status": "404 Not Found"}),
        (page(ARTICLE), {"mime": "text/html", "WARC-Identified-Payload-Type": "application/pdf"}),
    ]
    assert list(read_archive(written(archive, *others))) == []


def test_texts_of_a_wet_file(tmp_path: Path):
    file = written(
        tmp_path / "crawl.wet.gz",
        ((ARTICLE + "\n" + ADVICE).encode(), {"kind": "conversion", "mime": "text/plain"}),
        (b"\xff\xfe\xfd", {"kind": "conversion", "mime": "text/plain"}),
    )
    assert list(read_archive(file)) == [(ARTICLE + "\n" + ADVICE, None), ("", "not UTF-8")]


def test_pages_that_are_or_unpack_too_large_are_not_read(archive: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "MAX_RECORD_BYTES", 10_000)
    bomb = gzip.compress(b"a" * 20_000_000)
    assert len(bomb) > 10_000
    file = written(
        archive,
        (page(ARTICLE * 500), {}),
        (bomb, {"encoding": "gzip"}),
        (gzip.compress(page(ARTICLE, ADVICE)), {"encoding": "gzip"}),
        (b"<html><body></body></html>", {}),
    )
    assert [problem for _, problem in read_archive(file)] == ["page too large", "page too large", None, "no main text"]


def test_a_corpus_of_archives_counts_what_it_cannot_read(tmp_path: Path):
    folder = tmp_path / "crawl"
    folder.mkdir()
    pages = [(page(*(text_of((n, part), 120) for part in range(4))), {}) for n in range(6)]
    written(folder / "0.warc.gz", *pages[:3])
    cut = written(folder / "1.warc.gz", *pages[3:]).read_bytes()
    (folder / "1.warc.gz").write_bytes(cut[:-300])
    (folder / "2.warc.gz").write_bytes(b"no archive at all")
    (folder / "3.warc").write_bytes(b"")
    (folder / "4.wet.gz").write_bytes(gzip.compress(b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: x\r\n\r\n"))
    counters = load_record(built(recipe_of(tmp_path / "data", own("web", folder)))).inputs["web"]
    assert counters.kept == 5  # three of the first archive, and two of the second before the cut
    assert counters.documents == counters.kept + removed_from(counters)
    assert counters.removed["read"] == {"the file is damaged (ValueError)": 2, "empty text": 1}
