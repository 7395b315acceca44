"""Tables, metadata, archives, saved data sets, pictures and names of files with anything in them.

What comes of it are counted rows or one message: never more, and never what lies outside of the folder.
"""

import csv
import decimal
import io
import itertools
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from m6.data.build import check_row
from m6.data.sources import Row, SourceOptions, find_source
from m6.data.sources.pictures import BadPicture, decode_here
from tests.fuzz.examples import long_and_short, refusal, search

names = st.one_of(
    st.sampled_from(["good.png", "text", "caption", "file_name", "image", "label", "id"]), st.text(max_size=8)
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30), names)
cells = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=4
)


def picture(colour: str = "red", mode: str = "RGB", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).convert(mode).save(buffer, kind)
    return buffer.getvalue()


PICTURE, SECRET_PICTURE, SECRET = picture(), picture("blue"), "秘密"
# Where a secret lies beside the folder that is read.
OUTSIDE = (
    "../secret.png",
    "a/../../secret.png",
    "link.png",
    "{}/secret.png",
    "file://{}/secret.png",
    "linked/secret.png",
)


def make_secrets(path: Path, folder: Path) -> Path:
    """Makes what no name in the folder may lead to, and links to it."""
    (path / "secret.png").write_bytes(SECRET_PICTURE)
    (folder / "link.png").symlink_to(path / "secret.png")
    (folder / "linked").symlink_to(path)
    datasets.Dataset.from_dict({"text": [SECRET]}).save_to_disk(str(path / "private"))
    return folder


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "good.png").write_bytes(PICTURE)
    return path


def read(path: Path, **columns: str) -> list[Row]:
    """Reads a source and checks its rows as a build does: a message ends it, or each row is usable or counted."""
    rows: list[Row] = []

    def check() -> None:
        source = find_source(f"mine={path}", SourceOptions(cache=path, licence="private", **columns))
        source.origin()
        for row in source.rows():
            checked, problem = check_row(row, source.kind, max_chars=256)
            checked.id.encode("utf-8")
            checked.text.encode("utf-8")
            assert problem != ""
            assert SECRET not in (row.text, row.answer, row.context)
            assert row.image != SECRET_PICTURE
            rows.append(row)

    assert len(refusal(check)) < 3000
    return rows


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


@long_and_short(80, 400)
def test_samples_of_archives(number: int, tmp_path: Path):
    """Each member of a sample is in its row, is counted, or makes the sample a bad row."""
    file = tmp_path / "pairs.tar"
    suffixes = st.sampled_from(["png", "PNG", "jpg", "seg.png", "txt", "ocr.txt", "json", "cls", "a.b.c"])
    contents = {suffix: f"{suffix} text".encode() for suffix in ("txt", "ocr.txt", "cls", "a.b.c")}

    @given(st.lists(st.tuples(st.sampled_from("ab"), suffixes), max_size=8))
    def check(members: list[tuple[str, str]]) -> None:
        members = sorted(members, key=lambda member: member[0])
        with tarfile.open(file, "w") as tar:
            for key, suffix in members:
                content = contents.get(suffix, b'{"text": "json text"}' if suffix == "json" else PICTURE)
                member = tarfile.TarInfo(f"{key}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        for row in read(file):
            mine = [suffix.lower() for key, suffix in members if row.id.endswith(f"/{key}")]
            pictures, unread = [s for s in mine if s in ("png", "jpg")], sum(count for _, count in row.unread)
            if row.problem is None:
                assert len(pictures) == 1
                assert max(mine.count("txt"), mine.count("json")) <= 1
                assert row.text == ("txt text" if "txt" in mine else "json text" if "json" in mine else "")
                # A text of the .json that the .txt goes before is counted too.
                assert unread == len(mine) - len({"txt", "json", *pictures} & set(mine)) + (
                    {"txt", "json"} <= set(mine)
                )
            else:
                is_good = len(pictures) == 1 and max(mine.count("txt"), mine.count("json")) <= 1
                assert not is_good, row.problem

    search(number, check)


@long_and_short(80, 400)
def test_names_that_lead_elsewhere(number: int, tmp_path: Path):
    """Names of metadata, tables and dictionaries of Arrow."""
    folder = make_secrets(tmp_path, make_folder(tmp_path / "photos"))
    outside = st.sampled_from([name.format(tmp_path) for name in OUTSIDE])
    inside = st.sampled_from(["good.png", "./good.png", "none.png", "", ".", "linked"])
    name = outside | inside | st.text(max_size=5)
    forms = st.sampled_from(
        ["metadata.jsonl", "metadata.csv", "rows.jsonl", "rows.csv", "rows.parquet", "dicts.parquet"]
    )

    @given(forms, st.lists(name, min_size=1, max_size=4))
    def check(form: str, wanted: list[str]) -> None:
        column = "file_name" if form.startswith("metadata") else "image"
        wanted = [name.encode("utf-8", "replace").decode() for name in wanted]
        file = folder / form
        if form.endswith("jsonl"):
            file.write_text("".join(json.dumps({column: name, "text": "一"}) + "\n" for name in wanted))
        elif form.endswith("csv"):
            with file.open("w", newline="") as opened:
                csv.writer(opened).writerows([[column, "text"], *([name.replace("\x00", ""), "一"] for name in wanted)])
        else:
            named: list[Any] = [{"bytes": None, "path": name} for name in wanted] if form[0] == "d" else wanted
            pq.write_table(pa.table({"text": ["一"] * len(wanted), "image": named}), file)
        rows = read(folder)
        file.unlink()
        assert {row.image for row in rows} <= {None, PICTURE}

    search(number, check)


@long_and_short(40, 250)
def test_saved_data_sets(number: int, tmp_path: Path):
    """Descriptions with anything in them, also names that lead elsewhere, and bytes of Arrow that are changed."""
    path = tmp_path / "saved"
    rows = datasets.Dataset.from_dict({"text": ["一", "二"], "label": [1, 2]})
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(path))
    make_secrets(tmp_path, path)
    arrow, state, top = (
        path / "train" / "data-00000-of-00001.arrow",
        path / "train" / "state.json",
        path / "dataset_dict.json",
    )
    whole = {file: file.read_bytes() for file in (arrow, state, top)}
    foreign = "private/data-00000-of-00001.arrow"
    files = st.sampled_from(
        [arrow.name, f"../../{foreign}", str(tmp_path / foreign), f"../linked/{foreign}", "../test/" + arrow.name]
    )
    splits = st.sampled_from(["train", "test", "../private", "linked/private", str(tmp_path / "private"), "."])
    listed = st.lists(st.fixed_dictionaries({"filename": files | cells}) | cells, max_size=3)
    keys = st.sampled_from(
        ["_data_files", "_format_type", "_format_kwargs", "_format_columns", "_split", "_fingerprint"]
    )

    @given(
        st.none() | st.dictionaries(st.just("_data_files"), listed) | st.dictionaries(keys, cells, max_size=3),
        st.none() | st.lists(splits | cells, max_size=3) | cells,
        st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=4)), max_size=2),
    )
    def check(changes: dict[str, Any] | None, named: Any, flips: list[tuple[int, bytes]]) -> None:
        raw = bytearray(whole[arrow])
        for position, damage in flips:
            raw[position : position + len(damage)] = damage
        arrow.write_bytes(raw)
        state.write_text(json.dumps(json.loads(whole[state]) | (changes or {})))
        top.write_text(json.dumps({"splits": named}) if named is not None else whole[top].decode())
        assert {row.text for row in read(path, label_column="label")} <= {"一", "二", ""} or flips

    search(number, check)


@long_and_short(80, 400)
def test_labels_of_any_values(number: int, tmp_path: Path):
    """Rows whose labels are equal are of one class, in JSON Lines and in Parquet."""
    numbers = st.integers(-3, 3) | st.integers() | st.floats() | st.decimals(-9, 9, places=2) | st.booleans()

    @given(st.lists(numbers, min_size=1, max_size=6), st.sampled_from(["jsonl", "parquet"]))
    def check(values: list[Any], form: str) -> None:
        file = tmp_path / f"rows.{form}"
        if form == "jsonl":
            values = [float(value) if isinstance(value, decimal.Decimal) else value for value in values]
            file.write_text("".join(json.dumps({"text": "一", "label": value}) + "\n" for value in values))
        else:
            values = [value for value in values if type(value) is type(values[0])]
            try:
                pq.write_table(pa.table({"text": ["一"] * len(values), "label": values}), file)
            except (pa.ArrowException, OverflowError):
                return
        rows = read(file, label_column="label")
        assert len(rows) == len(values)
        for (one, value), (other, compared) in itertools.combinations(zip(rows, values, strict=True), 2):
            if one.problem is None and other.problem is None:
                assert (one.answer == other.answer) == (value == compared)

    search(number, check)


@long_and_short(60, 300)
def test_pictures_of_any_bytes(number: int):
    """A picture is decoded, or refused for a reason; whole ones of modes that are read are never refused."""
    modes = {"PNG": ["1", "L", "LA", "P", "RGB", "RGBA"], "TIFF": ["1", "L", "CMYK", "YCbCr", "RGB", "I", "F", "LAB"]}
    modes |= {"JPEG": ["L", "CMYK", "RGB"], "GIF": ["L", "P"], "BMP": ["1", "L", "P", "RGB"], "WEBP": ["RGB", "RGBA"]}
    whole = {(kind, mode): picture("red", mode, kind) for kind, some in modes.items() for mode in some if mode != "LAB"}

    @given(
        st.sampled_from(sorted(whole)),
        st.lists(st.tuples(st.integers(0, 300), st.binary(min_size=1, max_size=2)), max_size=3),
    )
    def check(named: tuple[str, str], flips: list[tuple[int, bytes]]) -> None:
        raw = bytearray(whole[named])
        for position, damage in flips:
            raw[position : position + len(damage)] = damage
        try:
            assert decode_here(bytes(raw), 8).picture.mode in ("RGB", "RGBA")
            refused = ""
        except BadPicture as problem:
            refused = str(problem)
        if bytes(raw) == whole[named]:
            assert ("colours that are not read" in refused) == (named[1] in ("I", "F"))
            assert not refused or named[1] in ("I", "F")

    search(number, check)
