"""Damaged and hostile inputs: counted and named, never followed, never the end of a task."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m6.corpus.counters import SAMPLES
from m6.corpus.output import load_record
from m6.data.sources.folders import MAX_LINE_BYTES
from tests.fixtures.corpus import built, own, recipe_of, text_of, write_lines


def good(number: int) -> bytes:
    return json.dumps({"text": text_of(("good", number))}).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "web"
    folder.mkdir()
    lines = [
        good(0),
        b"{broken",
        b"[" * 100_000,
        b'{"text": "' + "好".encode()[:2] + b'"}',
        b"",  # a blank line is no document
        b'{"text": null}',
        b'{"text": 3}',
        b'{"text": "   "}',
        b'{"text": "\\ud800' + text_of("surrogate").replace("\n", "").encode() + b'"}',
        b'{"text": "' + b"x" * MAX_LINE_BYTES + b'"}',
        good(1),
    ]
    (folder / "lines.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    packed = gzip.compress(b"\n".join(good(number) for number in range(2, 40)), mtime=0)
    (folder / "cut.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (folder / "no.jsonl.gz").write_bytes(b"this is not gzip")
    pq.write_table(pa.table({"text": [text_of("whole")]}), folder / "whole.parquet")
    (folder / "cut.parquet").write_bytes((folder / "whole.parquet").read_bytes()[:-20])
    pq.write_table(pa.table({"body": ["今天"]}), folder / "other.parquet")
    bad = pa.array([text_of("a").encode(), b"\xff\xfe", text_of("b").encode()]).view(pa.string())
    pq.write_table(pa.table({"text": bad}), folder / "bytes.parquet")
    (tmp_path / "secret.jsonl").write_bytes(good(99))
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    os.mkfifo(folder / "pipe.jsonl")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "bytes.txt").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "books" / "good.txt").write_text(text_of("book"), encoding="utf-8")
    return folder


def test_what_cannot_be_read_is_counted_and_named(folder: Path, tmp_path: Path):
    out = built(recipe_of(tmp_path / "data", [*own("web", folder), *own("books", tmp_path / "books")]))
    assert load_record(out).inputs["books"].removed == {"read": {"not UTF-8": 1}}
    counters = load_record(out).inputs["web"]
    read = counters.removed.pop("read")
    assert counters.removed == {}
    assert read == {
        "invalid JSON": 1,
        "JSON that is nested too deeply": 1,
        "not UTF-8": 1,
        "the text is null": 1,
        "the text is int": 1,
        "empty text": 1,
        "line too long": 1,
        "the file is damaged (EOFError)": 1,
        "the file is damaged (BadGzipFile)": 1,
        "the file is damaged (ArrowInvalid)": 1,
        'no column "text"': 1,
        "the text is not UTF-8": 1,
        "outside of the folder": 1,
        "not a regular file": 1,
    }
    assert counters.documents == counters.kept + read.total()
    named = {sample.id for reason, samples in counters.samples.items() for sample in samples}
    assert {"web/lines.jsonl:2", "web/cut.parquet:1", "web/link.jsonl", "web/bytes.parquet:2"} <= named
    written = b"".join(file.read_bytes() for file in out.rglob("*.parquet"))
    assert text_of(("good", 99))[:20].encode() not in written


def test_samples_are_bounded(tmp_path: Path):
    write_lines(tmp_path / "a.jsonl", [text_of(0), *("短" * (n % 40 + 1) for n in range(500))])
    counters = load_record(built(recipe_of(tmp_path / "data", own("web", tmp_path / "a.jsonl")))).inputs["web"]
    assert counters.removed["filter"]["too short"] == 500
    assert len(counters.samples["filter: too short"]) == SAMPLES
