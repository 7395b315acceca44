"""What a sample holds beyond one picture and one text: named and counted, and nothing takes the place of another."""

import io
import json
import tarfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m6.corpus.output import load_record
from m6.corpus.reading import read_pictures
from m6.data.build import BuildSettings, build
from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.data.sources import Row, SourceOptions, find_source
from tests.fixtures.corpus import built, own, recipe_of, text_of
from tests.fixtures.photographs import file_of, photograph, write_tar


def png(colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    return buffer.getvalue()


def tar_of(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Writes members as they are, also two of one name."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def read(path: Path, **options: object) -> list[Row]:
    source = find_source(f"mine={path}", SourceOptions(cache=path, licence="private", **options))
    source.origin()
    return list(source.rows())


PHOTO, MASK, TEXT = png("red"), png("blue"), "一只猫".encode()
PAIR = [("a.png", PHOTO), ("a.txt", TEXT)]
SIDES = [("b.front.png", PHOTO), ("b.back.png", MASK), ("b.txt", TEXT)]
LONGER = "missing image (its pictures have longer names, as KEY.seg.png)"
TWO_PICTURES = "two pictures, such as KEY.jpg and KEY.png"


@pytest.mark.parametrize(
    ("members", "image", "text", "problem", "unread"),
    [
        ([("a.png", PHOTO), ("a.seg.png", MASK), ("a.txt", TEXT)], PHOTO, "一只猫", None, {".seg.png": 1}),
        ([("a.seg.png", MASK), ("a.png", PHOTO), ("a.txt", TEXT)], PHOTO, "一只猫", None, {".seg.png": 1}),
        ([*PAIR, ("a.ocr.txt", b"ocr")], PHOTO, "一只猫", None, {".ocr.txt": 1}),
        (SIDES, None, "", LONGER, {".front.png": 1, ".back.png": 1}),
        ([("b.seg.png", MASK), ("b.txt", TEXT)], None, "", LONGER, {".seg.png": 1}),
        ([("a.jpg", PHOTO), ("a.png", MASK), ("a.txt", TEXT)], None, "", TWO_PICTURES, {}),
        ([("a.png", PHOTO), ("a.PNG", MASK), ("a.txt", TEXT)], None, "", "two members of one name", {}),
        ([*PAIR, ("a.txt", b"dog")], None, "", "two members of one name", {}),
        ([*PAIR, ("a.cls", b"1"), ("a", b"2")], PHOTO, "一只猫", None, {".cls": 1, "without a suffix": 1}),
        ([*PAIR, ("a.json", b'{"text": "dog"}')], PHOTO, "一只猫", None, {"'text' of .json": 1}),
        ([*PAIR, ("a.json", '{"text": "一只猫"}'.encode())], PHOTO, "一只猫", None, {}),
        ([("a.png", PHOTO), ("a.json", b'{"text": "cat", "text": "dog"}')], PHOTO, "", "the text is given twice", {}),
        ([("a.png", PHOTO), ("a.json", b'{"text": 7}')], PHOTO, "", "the text is int", {}),
        ([("._a.png", b"x"), *PAIR], PHOTO, "一只猫", None, {}),
    ],
)  # fmt: skip
def test_samples_of_tars(
    members: list[tuple[str, bytes]],
    image: bytes | None,
    text: str,
    problem: str | None,
    unread: dict[str, int],
    tmp_path: Path,
):
    [row] = read(tar_of(tmp_path / "mine.tar", members))
    assert (row.image, row.text, row.problem, dict(row.unread)) == (image, text, problem, unread)


def test_a_key_that_comes_again_takes_nobodys_place(tmp_path: Path):
    members = [*PAIR, ("b.png", PHOTO), ("a.png", MASK), ("a.txt", b"dog"), ("b.txt", TEXT)]
    rows = [(row.id[-1], row.image, row.text, row.problem) for row in read(tar_of(tmp_path / "mine.tar", members))]
    apart = "its members are not next to each other in the archive"
    assert rows == [
        ("a", PHOTO, "一只猫", None),
        ("b", PHOTO, "", None),  # the build finds that its text is empty
        ("a", None, "", apart),
        ("b", None, "", apart),
    ]


HIDDEN = [(".b.png", PHOTO), (".txt", TEXT), ("x/.c.json", b"{}"), (".DS_Store", b"x")]


@pytest.mark.parametrize("form", ["tar", "pictures", "metadata", "jsonl", "csv", "parquet", "txt", "class"])
def test_hidden_files_are_counted_and_those_of_macos_are_none(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    apple = b"\0\5\x16\7\0\2\0\0Mac OS X\xff"
    folder = tmp_path / "mine"
    for name in ("__MACOSX", ".ipynb_checkpoints", "cat"):
        (folder / name).mkdir(parents=True)
    picture, table = folder / "cat" / "a.png", folder / f"rows.{form}"
    files = {"pictures": [picture, picture.with_suffix(".txt")], "metadata": [picture, folder / "metadata.jsonl"]}
    for file in files.get(form, [picture] if form == "class" else [table]):
        file.write_bytes(PHOTO if file.suffix == ".png" else b'{"file_name": "cat/a.png", "text": "cat"}')
    if form == "tar":
        tar_of(table, [("._a.png", apple), *PAIR, *HIDDEN, ("__MACOSX/._a.png", apple)])
    elif form == "parquet":
        pq.write_table(pa.table({"text": ["cat"]}), table)
    elif form == "csv":
        table.write_text("text\ncat\n")
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        (folder / "__MACOSX" / file.name).write_bytes(apple)
        file.with_name(f"._{file.name}").write_bytes(apple)
        (folder / ".ipynb_checkpoints" / file.name).write_bytes(file.read_bytes())
    assert [row.problem for row in read(folder)] == [None]
    number = 1 + (form in files)
    said = capsys.readouterr().err
    assert f'note: "mine": {number} hidden files are not read, such as .ipynb_checkpoints/' in said
    assert (form == "tar") == ('note: "mine/rows.tar": 3 hidden files are not read, such as .b.png' in said)


def test_a_caption_with_a_suffix_in_capitals(tmp_path: Path):
    for name, content in (("A.PNG", PHOTO), ("A.TXT", TEXT), ("b.png", PHOTO), ("b.txt", TEXT), ("b.TXT", b"dog")):
        (tmp_path / name).write_bytes(content)
    assert [(row.text, row.problem) for row in read(tmp_path)] == [
        ("一只猫", None),
        ("", "two captions, such as NAME.txt and NAME.TXT"),
    ]


def test_questions_are_of_the_json_and_captions_are_counted(tmp_path: Path):
    entry = json.dumps({"ask": "有几只？", "kind": "一只"}).encode()
    path = tar_of(tmp_path / "mine.tar", [*PAIR, ("a.json", entry)])
    [row] = read(path, question_column="ask", label_column="kind")
    assert (row.question, row.answer, dict(row.unread)) == ("有几只？", "一只", {".txt": 1})


def test_a_sample_of_a_million_members_is_one_bad_row(tmp_path: Path):
    members = [(f"photo.{number}.png", b"x") for number in range(2000)]
    [row] = read(tar_of(tmp_path / "mine.tar", members))
    assert row.problem == LONGER
    assert len(row.unread) == 101
    assert sum(number for _, number in row.unread) == 2000


@pytest.mark.parametrize("workers", [1, 2])
def test_the_build_names_and_counts_what_is_not_read(workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    members = []
    for number in range(3):
        members += [
            (f"{number}.png", file_of(photograph(number), "PNG")),
            (f"{number}.seg.png", MASK),
            (f"{number}.txt", f"第{number}张".encode()),
        ]
    path = tar_of(tmp_path / "mine.tar", [*members, ("3.jpg", PHOTO), ("3.png", PHOTO), ("3.depth.tif", MASK)])
    source = find_source(str(path), SourceOptions(cache=tmp_path, licence="private"))
    settings = BuildSettings(validation_share=0.0, test_share=0.0, max_bad_share=0.3)
    manifest, _ = build([source], tmp_path / "out", settings, workers)
    entry = Manifest.load(tmp_path / "out").sources["mine"]
    assert (entry.skipped, entry.unread) == ({TWO_PICTURES: 1}, {".seg.png": 3, ".depth.tif": 1})
    assert "mine: 4 members of its samples are not read (.seg.png: 3, .depth.tif: 1)" in capsys.readouterr().err
    for row in open_split(manifest, "mine", "train"):
        colours = Image.open(io.BytesIO(row["image"])).getcolors(1 << 16)
        assert colours is None or len(colours) > 100, "a photograph, and not its mask"


def test_a_corpus_counts_them_too(tmp_path: Path):
    members = {"a.jpg": file_of(photograph(1)), "a.seg.jpg": file_of(photograph(2)), "a.txt": "一只黑色的猫".encode()}
    write_tar(tmp_path / "web" / "rows.tar", members)
    out = built(recipe_of(tmp_path / "data", own("web", tmp_path / "web")))
    assert load_record(out).inputs["web"].unread == {".seg.jpg": 1}
    assert Manifest.load(out).sources["web"].unread == {".seg.jpg": 1}


def test_a_corpus_reads_no_hidden_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, text in (("a.jsonl", text_of(1)), (".old/a.jsonl", text_of(2)), ("._a.jsonl", "")):
        (tmp_path / "web" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "web" / name).write_text(json.dumps({"text": text}) if text else "\0\5Mac")
    counters = load_record(built(recipe_of(tmp_path / "data", own("web", tmp_path / "web")))).inputs["web"]
    assert (counters.documents, counters.removed) == (1, {})
    assert "2 others are not read, such as ._a.jsonl" in capsys.readouterr().err


def test_pictures_that_are_held_out_need_no_good_text(tmp_path: Path):
    path = tar_of(
        tmp_path / "set.tar", [("a.png", PHOTO), ("a.json", b'{"text": 7}'), ("b.png", PHOTO), ("b.txt", b"\xff")]
    )
    assert [(row.image, row.problem) for row in read_pictures(path, "set", "image")] == [(PHOTO, None)] * 2


@pytest.mark.parametrize("form", ["jsonl", "csv", "metadata.jsonl", "metadata.csv", "parquet"])
def test_no_column_takes_the_place_of_another(form: str, tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "a.png").write_bytes(PHOTO)
    file = folder / (form if "metadata" in form else f"rows.{form}")
    if form == "parquet":
        pq.write_table(pa.Table.from_arrays([["a.png"], ["cat"], ["dog"]], names=["image", "text", "text"]), file)
    else:
        key = "file_name" if "metadata" in form else "image"
        jsonl = f'{{"{key}": "a.png", "text": "cat", "text": "dog"}}\n'
        file.write_text(jsonl if form.endswith("jsonl") else f"{key},text,text\na.png,cat,dog\n")
    assert [row.problem for row in read(folder)] == ["the text is given twice"]


@pytest.mark.parametrize("form", ["jsonl", "csv", "metadata.jsonl", "parquet", "saved", "tar"])
def test_columns_that_are_not_read_are_named(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "mine"
    folder.mkdir()
    entry = {"text": "cat", "mask": "b.png", "ocr": "words"}
    if form == "metadata.jsonl":
        (folder / "a.png").write_bytes(PHOTO)
        (folder / form).write_text(json.dumps({"file_name": "a.png", **entry}))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist([entry]), folder / "rows.parquet")
    elif form == "saved":
        datasets.Dataset.from_list([entry]).save_to_disk(str(folder))
    elif form == "tar":
        tar_of(folder / "rows.tar", [("a.png", PHOTO), ("a.json", json.dumps(entry).encode())])
    else:
        (folder / f"rows.{form}").write_text(
            json.dumps(entry) if form == "jsonl" else "text,mask,ocr\ncat,b.png,words\n"
        )
    assert [row.text for row in read(folder)] == ["cat"]
    assert "2 columns are not read: 'mask', 'ocr'" in capsys.readouterr().err


def test_pictures_that_no_row_names_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(PHOTO)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "cat", "image": "a.png"}))
    assert len(read(tmp_path)) == 1
    assert "1 pictures that no row names are not read, such as b.png" in capsys.readouterr().err


def test_two_captions_of_a_picture_are_two_rows(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(PHOTO)
    lines = [json.dumps({"file_name": "a.png", "text": text}) for text in ("cat", "dog")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    assert [(row.id, row.text) for row in read(tmp_path)] == [("mine/a.png", "cat"), ("mine/a.png:2", "dog")]
