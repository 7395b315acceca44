"""Data that is damaged or hostile: nothing outside of the folder is read, and nothing is lost in silence."""

import io
import json
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from m6.data.build import BuildSettings, build, check_row
from m6.data.sources import Row, SourceOptions, find_source
from m6.data.sources.text import _SENTENCE, _unless_only_marks, clean, passages
from m6.errors import UserError


def png(colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


def read(path: Path, **options: object) -> list[Row]:
    source = find_source(f"mine={path}", SourceOptions(cache=path, licence="private", **options))
    source.origin()
    return list(source.rows())


def problems(rows: list[Row]) -> dict[str, str | None]:
    return {row.id: row.problem for row in rows}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "good.png").write_bytes(png())
    (tmp_path / "photos" / "good.txt").write_text("一只猫")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "secret.png").write_bytes(png("blue"))
    return tmp_path / "photos"


def test_links_out_of_the_folder_are_refused_and_listed(folder: Path):
    (folder / "a.png").symlink_to(folder.parent / "secret.png")
    (folder / "b.png").write_bytes(png())
    (folder / "b.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "c.png").symlink_to("good.png")  # inside: as good as a file
    (folder / "c.txt").write_text("一条狗")
    (folder / "d.png").symlink_to("d.png")
    rows = read(folder)
    assert problems(rows) == {
        "mine/a.png": "outside of the folder",
        "mine/b.png": "no caption",
        "mine/c.png": None,
        "mine/d.png": "missing image",
        "mine/good.png": None,
    }
    assert "secret" not in {row.text for row in rows}


@pytest.mark.timeout(60)
def test_pipes_and_devices_do_not_block(folder: Path):
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "good2.txt")
    (folder / "good2.png").write_bytes(png())
    (folder / "zero.png").symlink_to("/dev/zero")
    assert problems(read(folder)) == {
        "mine/good.png": None,
        "mine/good2.png": "no caption",
        "mine/pipe.png": "not a regular file",
        "mine/zero.png": "outside of the folder",
    }


@pytest.mark.parametrize("suffix", ["tar", "jsonl", "parquet"])
def test_a_linked_archive_or_table_is_named(folder: Path, suffix: str):
    (folder.parent / f"elsewhere.{suffix}").write_bytes(b"")
    (folder / f"x.{suffix}").symlink_to(folder.parent / f"elsewhere.{suffix}")
    with pytest.raises(UserError, match=rf"x\.{suffix} is not read \(outside of the folder\)"):
        read(folder)


@pytest.mark.parametrize("specifier", ["a=", ".", "a=.", ""])
def test_the_working_directory_is_no_source(specifier: str, tmp_path: Path):
    with pytest.raises(UserError, match="names no source"):
        find_source(specifier, SourceOptions(cache=tmp_path, licence="private"))


@pytest.mark.parametrize(
    "name", ["x" * 5000 + ".png", "a\x00b.png", "../secret.png", "/etc/passwd", "\ud800.png", "x/../good.png"]
)
def test_a_bad_file_name_costs_one_row(folder: Path, name: str):
    lines = [{"file_name": name, "text": "坏"}, {"file_name": "good.png", "text": "好"}]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    bad, good = read(folder)
    assert bad.problem in ("missing image", "missing file", "outside of the folder")
    assert (good.text, good.problem) == ("好", None)


def archive(path: Path, pairs: int) -> Path:
    with tarfile.open(path, "w") as tar:
        for number in range(pairs):
            for suffix, content in (("png", png()), ("txt", f"第{number}张".encode())):
                member = tarfile.TarInfo(f"{number:04d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def test_a_whole_archive_is_read(tmp_path: Path):
    assert len(read(archive(tmp_path / "whole.tar", 20))) == 20


@pytest.mark.parametrize("seed", range(12))
def test_an_archive_that_was_cut_off_is_not_taken_as_whole(tmp_path: Path, seed: int):
    path = archive(tmp_path / "cut.tar", 20)
    with tarfile.open(path) as tar:
        end = max(member.offset_data + member.size for member in tar.getmembers())
    path.write_bytes(path.read_bytes()[: random.Random(seed).randrange(512, end)])
    with pytest.raises(UserError, match="is not a complete tar file"):
        read(path)


@pytest.mark.parametrize("member", [1, 10, 11, 39])
def test_a_damaged_header_does_not_end_an_archive_in_silence(tmp_path: Path, member: int):
    path = archive(tmp_path / "damaged.tar", 20)
    with tarfile.open(path) as tar:
        offset = tar.getmembers()[member].offset
    content = bytearray(path.read_bytes())
    content[offset + 150] ^= 4  # in the checksum of the header
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a complete tar file"):
        read(path)


def test_rows_without_a_text_are_counted(tmp_path: Path):
    table = pa.table({"text": ["好的，谢谢。", None, "", "。。。"]})
    pq.write_table(table, tmp_path / "texts.parquet")
    assert list(problems(read(tmp_path / "texts.parquet")).values()) == [
        None,
        "the text is null",
        "empty text",
        "a text without letters and digits",
    ]
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    assert set(problems(read(tmp_path / "numbers.parquet")).values()) == {"the text is int"}


GOOD = b'{"file_name": "good.png", "text": "\xe5\xa5\xbd"}\n'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"[" * 100_000 + b"]" * 100_000 + b"\n", "JSON that is nested too deeply"),
        (b'{"file_name": "good.png", "text": "\xff\xfe"}\n', "not UTF-8"),
        (b"\x00\x01\n", "invalid JSON"),
        (b"[1, 2]\n", "JSON that is no object but list"),
        (b"NaN\n", "JSON that is no object but nan"),
        (b'{"file_name": "good.png", "text": ' + b"9" * 5000 + b"}\n", "a number of too many digits"),
        (b'{"text": "' + b"x" * (9 << 20) + b'"}\n', "line too long"),
    ],
    ids=["deep", "not UTF-8", "binary", "a list", "no number", "many digits", "long"],
)
def test_a_bad_line_of_metadata_costs_one_row(folder: Path, line: bytes, problem: str):
    (folder / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD + line + GOOD)
    assert [row.problem for row in read(folder)] == [None, problem, None]
    (folder / "rows.jsonl").write_bytes(b"\n" + GOOD + line)
    assert problems(read(folder / "rows.jsonl")) == {"mine/0/0": None, "mine/rows.jsonl:3": problem}


def test_an_empty_object_is_valid_json(folder: Path):
    (folder / "rows.jsonl").write_bytes(GOOD + b"{}\n")
    assert problems(read(folder / "rows.jsonl")) == {"mine/0/0": None, "mine/1": "the text is null"}


def test_blank_lines_of_metadata_are_no_rows(folder: Path):
    (folder / "metadata.jsonl").write_bytes(GOOD + b"\n \r\n" + b"{torn\n\n")
    assert problems(read(folder)) == {"mine/good.png": None, "mine/metadata.jsonl:4": "invalid JSON"}


@pytest.mark.parametrize("form", ["beside", "tar"])
def test_a_caption_that_is_not_utf_8_is_counted(folder: Path, form: str):
    content = "今天".encode("gbk")
    if form == "beside":
        (folder / "good.txt").write_bytes(content)
    else:
        with tarfile.open(folder / "a.tar", "w") as tar:
            for name, part in (("a.png", png()), ("a.txt", content)):
                member = tarfile.TarInfo(name)
                member.size = len(part)
                tar.addfile(member, io.BytesIO(part))
    assert list(problems(read(folder)).values()) == ["not UTF-8"]


def test_texts_that_are_no_captions_do_not_hide_classes(tmp_path: Path):
    for name in ("cat", "dog"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "a.png").write_bytes(png())
    (tmp_path / "classes" / "LICENSE.txt").write_text("MIT")
    assert [row.answer for row in read(tmp_path / "classes")] == ["cat", "dog"]


@pytest.mark.parametrize(
    "content", ["file_name,text\ngood.png,caf\u00e9\n".encode("latin-1"), "file_name,text\n".encode("utf-16")]
)
def test_a_csv_in_another_encoding_is_one_clean_message(folder: Path, content: bytes):
    (folder / "metadata.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"metadata\.csv is not UTF-8 \(byte 0x.*save it as UTF-8"):
        read(folder)


def test_fields_of_a_csv(folder: Path):
    (folder / "metadata.csv").write_text(f"file_name,text\ngood.png,{'好' * 70_000}\n")
    assert [len(row.text) for row in read(folder)] == [70_000]
    (folder / "metadata.csv").write_text(f"file_name,text\ngood.png,{'x' * (9 << 20)}\n")
    with pytest.raises(UserError, match="is not a CSV file that can be read: field larger"):
        read(folder)


@pytest.mark.parametrize("end", ["", "\n", "\ngood.png,b\n"])
def test_quotation_marks_that_are_not_closed_swallow_no_rows(folder: Path, end: str):
    (folder / "metadata.csv").write_text(f'file_name,text\ngood.png,a\ngood.png,"b\ngood.png,c{end}')
    with pytest.raises(UserError, match=r"is not a CSV file that can be read: it ends inside of quotation marks"):
        read(folder)
    (folder / "metadata.csv").write_text(f'\n\nfile_name,text\ngood.png,"a ""b""\nc"{end}')
    assert [row.text for row in read(folder)] == ['a "b"\nc', "b"][: 1 + len(end) // 2]


def test_an_empty_table(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "empty.csv").write_text("text\n")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    for form in ("jsonl", "csv", "parquet"):
        with pytest.raises(UserError, match=rf'"mine" is empty: .*empty\.{form} has no rows'):
            read(tmp_path / f"empty.{form}")


@pytest.mark.parametrize(("size", "rows"), [(10, 64), (32 << 10, 8), (640 << 10, 6)], ids=["small", "large", "huge"])
def test_equal_values_of_a_parquet_file_do_not_fill_the_memory(
    size: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A dictionary holds them once."""
    monkeypatch.setattr("m6.data.sources.rows._BATCH_BYTES", 64 << 10)
    batches = []
    monkeypatch.setattr("m6.data.sources.rows._selected", lambda batch, names: batches.append(batch.num_rows) or batch)
    table = pa.table({"text": ["好"] * 64, "image": [bytes(size)] * 64})
    pq.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    assert len(read(tmp_path / "rows.parquet")) == 64
    assert batches.pop(0) == 64  # of the texts, to see whether there are rows
    assert max(batches) == rows


def test_a_very_large_picture_of_a_table_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.data.sources.rows.MAX_PICTURE_BYTES", 1000)
    pq.write_table(pa.table({"text": ["好", "坏"], "image": [png(), bytes(1001)]}), tmp_path / "rows.parquet")
    assert [row.problem for row in read(tmp_path / "rows.parquet")] == [None, "larger than 64 MiB"]


def test_parquet_whose_features_are_no_object(tmp_path: Path):
    table = pa.table({"text": ["好"]}).replace_schema_metadata({b"huggingface": b'{"info": {"features": [1]}}'})
    pq.write_table(table, tmp_path / "odd.parquet")
    with pytest.raises(UserError, match="mine"):
        read(tmp_path / "odd.parquet")


@pytest.mark.timeout(60)
def test_a_text_without_sentences_is_cut_in_linear_time():
    text = "字" * 3_000_000
    cut = list(passages(text, 256))
    assert "".join(cut) == text
    assert {len(passage) for passage in cut[:-1]} == {256}


@settings(max_examples=200)
@given(st.text(alphabet="ab，。 \n！", max_size=400), st.integers(1, 50))
def test_cutting_by_positions_is_cutting_by_copies(text: str, limit: int):
    assert list(passages(text, limit)) == list(by_copies(text, limit))


def by_copies(document: str, limit: int) -> Iterator[str]:
    """The slow, obvious way: shortens the sentence at each cut."""
    passage = ""
    for sentence in _SENTENCE.findall(clean(document)):
        if len(passage) + len(sentence.rstrip()) > limit:
            yield from _unless_only_marks(passage)
            passage = ""
        while len(sentence.rstrip()) > limit:
            cut = 1 + max(sentence.rfind(mark, 0, limit) for mark in "，,、：: ") or limit
            yield from _unless_only_marks(sentence[:cut])
            sentence = sentence[cut:]
        passage += sentence
    yield from _unless_only_marks(passage)


def test_names_that_are_not_utf_8_are_listed(folder: Path, tmp_path: Path):
    name = os.fsdecode(b"\xff\xfe.png")
    (folder / name).write_bytes(b"no picture")
    source = find_source(f"mine={folder}", SourceOptions(cache=tmp_path, licence="private"))
    settings = BuildSettings(max_bad_share=1.0, validation_share=0.0, test_share=0.0)
    manifest, _ = build([source], tmp_path / "out", settings)
    assert manifest.sources["mine"].skipped == {"no caption": 1}
    [listed] = (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()
    assert json.loads(listed)["id"] == "mine/\\udcff\\udcfe.png"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["txt", "md", "parquet"])
def test_a_document_of_one_long_line_is_hashed_once(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For each passage, the whole document was hashed: quadratic time."""
    calls = []
    monkeypatch.setattr("m6.data.sources.rows.group_of_text", lambda text: calls.append(len(text)) or "group")
    text = "字 " * 100_000
    file = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.table({"text": [text]}), file)
    else:
        file.write_text(text)
    rows = read(file)
    assert len(rows) > 700
    assert {row.group for row in rows} == {"group"}
    assert calls == [len(text)]


def test_many_combining_marks_are_refused():
    """They are sorted in quadratic time by Unicode's normal forms, which a corpus uses."""
    long, usual = "a" + "\u0301\u0316" * 501, ("a" + "\u0301" * 40 + "!" * 1200) * 30
    row = Row("a", None, text=long)
    assert check_row(row, "text", max_chars=100_000)[1] == "more than 1000 combining marks in a row"
    assert check_row(Row("a", None, text=usual), "text", max_chars=100_000)[1] is None


def test_a_very_large_caption_is_not_read(folder: Path):
    with (folder / "good.txt").open("wb") as file:
        file.truncate(9 << 20)
    assert list(problems(read(folder)).values()) == ["caption larger than 8 MiB"]


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_linked_metadata_is_named(folder: Path, name: str):
    (folder.parent / "elsewhere").write_text("file_name,text\ngood.png,secret\n")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    with pytest.raises(UserError, match=rf"{name} is not read \(outside of the folder\)"):
        read(folder)
