"""Tables, metadata, archives and names of files with anything in them: counted rows or one message, never more."""

import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from m6.data.checking import check_row
from m6.data.sources import SourceOptions, find_source
from tests.fuzz.examples import long_and_short, refusal, search

names = st.one_of(
    st.sampled_from(["good.png", "text", "caption", "file_name", "image", "label", "id"]), st.text(max_size=8)
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), names)
cells = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=4
)


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    return buffer.getvalue()


PICTURE = picture()


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "good.png").write_bytes(PICTURE)
    return path


def read(path: Path) -> None:
    """Reads a source and checks its rows as a build does: a message ends it, or each row is usable or counted."""

    def check() -> None:
        source = find_source(f"mine={path}", SourceOptions(cache=path, licence="private"))
        source.origin()
        for row in source.rows():
            checked, problem = check_row(row, source.kind, max_chars=256)
            checked.id.encode("utf-8")
            checked.text.encode("utf-8")
            assert problem != ""

    assert len(refusal(check)) < 3000


@long_and_short(120, 400)
def test_metadata_lines(number: int, tmp_path: Path):
    folder = make_folder(tmp_path / "photos")
    rows = st.dictionaries(names, cells, max_size=4).map(json.dumps).map(str.encode)
    lines = st.one_of(rows, rows, cells.map(json.dumps).map(str.encode), st.binary(max_size=40))

    @given(st.lists(lines, max_size=5), st.sampled_from([b"\n", b"\r\n", b"\n\n"]))
    def check(content: list[bytes], end: bytes) -> None:
        (folder / "metadata.jsonl").write_bytes(end.join(content))
        read(folder)

    search(number, check)


@long_and_short(120, 400)
def test_csv_tables(number: int, tmp_path: Path):
    folder = make_folder(tmp_path / "photos")

    @given(
        st.lists(names, max_size=4),
        st.lists(st.lists(scalars, max_size=5), max_size=4),
        st.sampled_from(["utf-8", "utf-16", "gbk", "latin-1", "utf-8-sig"]),
        st.binary(max_size=6),
    )
    def check(header: list[str], rows: list[list[Any]], encoding: str, tail: bytes) -> None:
        text = io.StringIO()
        csv.writer(text).writerows([[name.replace("\x00", "") for name in header], *rows])
        (folder / "metadata.csv").write_bytes(text.getvalue().encode(encoding, "replace") + tail)
        read(folder)

    search(number, check)


@long_and_short(120, 400)
def test_text_tables(number: int, tmp_path: Path):
    @given(
        st.sampled_from(["jsonl", "csv", "txt", "parquet", "json", "md"]),
        st.one_of(
            st.binary(max_size=200),
            st.lists(st.dictionaries(names, cells, max_size=3).map(json.dumps), max_size=4)
            .map("\n".join)
            .map(str.encode),
        ),
    )
    def check(suffix: str, content: bytes) -> None:
        file = tmp_path / f"table.{suffix}"
        file.write_bytes(content)
        read(file)

    search(number, check)


@long_and_short(60, 250)
def test_parquet_tables(number: int, tmp_path: Path):
    columns = st.one_of(
        st.lists(st.text(max_size=10) | st.none(), min_size=3, max_size=3),
        st.lists(st.binary(max_size=10) | st.just(PICTURE), min_size=3, max_size=3),
        st.lists(st.integers(-9, 9) | st.none(), min_size=3, max_size=3),
        st.lists(st.lists(st.floats(), max_size=2), min_size=3, max_size=3),
        st.lists(
            st.fixed_dictionaries({"bytes": st.just(PICTURE) | st.none(), "path": st.text(max_size=5) | st.none()}),
            min_size=3,
            max_size=3,
        ),
    )

    @given(
        st.dictionaries(names, columns, min_size=1, max_size=3),
        st.dictionaries(
            st.sampled_from(["huggingface", "pandas"]), st.binary(max_size=30) | st.just(b'{"info": 3}'), max_size=1
        ),
    )
    def check(table: dict[str, list[Any]], metadata: dict[str, bytes]) -> None:
        file = tmp_path / "table.parquet"
        try:
            made = pa.table(table).replace_schema_metadata(metadata)
            pq.write_table(made, file)
        except (pa.ArrowException, UnicodeEncodeError):
            return  # no Parquet file can hold this
        read(file)

    search(number, check)


@long_and_short(80, 400)
def test_archives(number: int, tmp_path: Path):
    """Archives whose bytes are changed and cut, and members of every name."""
    file = tmp_path / "pairs.tar"
    members = st.lists(
        st.tuples(
            st.text(min_size=1, max_size=12),
            st.sampled_from(["png", "txt", "json", "tar", ""]),
            st.binary(max_size=20) | st.just(PICTURE),
        ),
        max_size=6,
    )

    @given(
        members,
        st.lists(st.tuples(st.integers(0, 8000), st.binary(min_size=1, max_size=2)), max_size=3),
        st.integers(0, 12000),
    )
    def check(wanted: list[tuple[str, str, bytes]], flips: list[tuple[int, bytes]], length: int) -> None:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", errors="surrogateescape") as tar:
            for stem, suffix, data in wanted:
                member = tarfile.TarInfo(f"{stem}.{suffix}".replace("\x00", ""))
                member.size = len(data)
                try:
                    tar.addfile(member, io.BytesIO(data))
                except UnicodeEncodeError:
                    continue
        raw = bytearray(content.getvalue())
        for position, damage in flips:
            raw[position : position + len(damage)] = damage
        file.write_bytes(raw[: max(length, 1)])
        read(file)

    search(number, check)


@long_and_short(60, 250)
def test_folders_of_any_names(number: int, tmp_path: Path):
    counter = iter(range(10**9))

    @given(
        st.lists(
            st.tuples(
                st.binary(min_size=1, max_size=30),
                st.sampled_from([b".png", b".txt", b".jpg", b"", b".md"]),
                st.binary(max_size=20),
            ),
            max_size=5,
        )
    )
    def check(files: list[tuple[bytes, bytes, bytes]]) -> None:
        folder = make_folder(tmp_path / str(next(counter)))
        for stem, suffix, content in files:
            name = stem.replace(b"\x00", b"").replace(b"/", b"") + suffix
            if name not in (b"", b".", b".."):
                (Path(bytes(folder).decode()) / name.decode("utf-8", "surrogateescape")).write_bytes(content)
        read(folder)

    search(number, check)
