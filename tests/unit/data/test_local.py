"""The user's own data: folders, tables, tars and the Hub."""

import csv
import io
import json
import pickle
import tarfile

import pytest
from PIL import Image
from typer.testing import CliRunner

from m6.cli.data import app
from m6.data.manifest import Manifest
from m6.data.sources import SourceOptions, find_source, find_sources
from m6.errors import UserError
from m6.files import cache_folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")


def png(colour="red", size=(8, 8)):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def options(tmp_path, **changes):
    return SourceOptions(**({"cache": tmp_path, "licence": "CC0-1.0"} | changes))


def rows_of(specifier, tmp_path, **changes):
    return list(find_source(str(specifier), options(tmp_path, **changes)).rows())


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "photos"
    (folder / "cats").mkdir(parents=True)
    for name in ("a.png", "cats/b.png", "c.png"):
        (folder / name).write_bytes(png())
    return folder


def test_captions_beside_pictures(folder, tmp_path):
    (folder / "a.txt").write_text("一只狗")
    (folder / "cats" / "b.txt").write_text("一只猫")
    assert [(row.id, row.text, row.problem) for row in rows_of(folder, tmp_path)] == [
        ("photos/a.png", "一只狗", None),
        ("photos/c.png", "", "no caption"),
        ("photos/cats/b.png", "一只猫", None),
    ]


def test_metadata_jsonl(folder, tmp_path):
    (tmp_path / "secret.png").write_bytes(png())
    lines = [
        {"file_name": "cats/b.png", "text": "一只猫"},
        {"file_name": "../secret.png", "text": "外面"},
        {"file_name": "none.png", "text": "没有"},
        {"file_name": "a.png", "text": 7},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{torn")
    rows = rows_of(folder, tmp_path)
    assert [(row.id, row.text, row.problem) for row in rows] == [
        ("photos/cats/b.png", "一只猫", None),
        ("photos/../secret.png", "", "outside of the folder"),
        ("photos/none.png", "", "missing image"),
        ("photos/a.png", "", "the text is int"),
        ("photos/metadata.jsonl:5", "", "invalid JSON"),
        ("photos/c.png", "", "not in the metadata"),
    ]
    with pytest.raises(UserError, match='no column "caption"; valid: file_name, text'):
        rows_of(folder, tmp_path, text_column="caption")


def test_metadata_csv(folder, tmp_path):
    with (folder / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["file_name", "caption"], ["a.png", "一只狗，在跑"]])
    rows = [row for row in rows_of(folder, tmp_path, text_column="caption") if row.problem is None]
    assert [(row.id, row.text) for row in rows] == [("photos/a.png", "一只狗，在跑")]


def test_a_folder_without_captions_is_an_error(folder, tmp_path):
    with pytest.raises(UserError, match=r"expected pictures with metadata\.jsonl"):
        find_source(str(folder), options(tmp_path))


def test_the_licence_has_to_be_stated(folder, tmp_path):
    (folder / "a.txt").write_text("一只狗")
    with pytest.raises(UserError, match='--licence is missing: under which licence may "photos" be used'):
        find_source(str(folder), options(tmp_path, licence=None))


def test_webdataset_reads_pictures_and_texts_alone(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    path = tmp_path / "shard-0.tar"
    entries = [
        ("0001.png", png()),
        ("0001.txt", "一只狗".encode()),
        ("0001.pkl", pickle.dumps(Evil())),
        ("0002.json", json.dumps({"text": "一只猫"}).encode()),
        ("0002.png", png()),
        ("0003.txt", "没有图".encode()),
        ("0004.png", png()),
        ("0004.json", b"{torn"),
    ]
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("0000.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    rows = rows_of(path, tmp_path)
    assert [(row.id, row.text, row.image == png(), row.problem) for row in rows] == [
        ("shard-0/shard-0.tar/0000", "", False, "not a regular file"),
        ("shard-0/shard-0.tar/0001", "一只狗", True, None),
        ("shard-0/shard-0.tar/0002", "一只猫", True, None),
        ("shard-0/shard-0.tar/0003", "", False, "missing image"),
        ("shard-0/shard-0.tar/0004", "", True, "invalid JSON"),
    ]
    assert not (tmp_path / "owned").exists()
    path.write_bytes(path.read_bytes()[:1552])  # inside the first picture
    with pytest.raises(UserError, match=r"shard-0\.tar is not a complete tar file"):
        rows_of(path, tmp_path)


def test_jsonl_text_becomes_passages(tmp_path):
    path = tmp_path / "news.jsonl"
    path.write_text("\n".join(json.dumps({"body": text, "n": 1}) for text in ("第一句。第二句。", "第三句。")))
    rows = rows_of(path, tmp_path, text_column="body", passage_chars=5)
    assert [(row.id, row.text) for row in rows] == [
        ("news/0/0", "第一句。"),
        ("news/0/1", "第二句。"),
        ("news/1/0", "第三句。"),
    ]
    assert rows[0].group == rows[1].group != rows[2].group
    with pytest.raises(UserError, match='news has no column "text"; valid: body, n'):
        rows_of(path, tmp_path)
    with pytest.raises(UserError, match='no column "img"'):
        rows_of(path, tmp_path, text_column="body", image_column="img")


def test_a_label_column_makes_labelled_texts(tmp_path):
    path = tmp_path / "reviews.jsonl"
    lines = [{"text": "很好。" * 9, "stars": 5}, {"text": "一般", "stars": None}]
    path.write_text("\n".join(map(json.dumps, lines)))
    source = find_source(str(path), options(tmp_path, label_column="stars", passage_chars=6))
    assert source.kind == "labelled_text"
    assert [(row.text, row.answer) for row in source.rows()] == [("很好。很好。", "5"), ("一般", None)]
    with pytest.raises(UserError, match='reviews has no column "star"; did you mean "stars"'):
        rows_of(path, tmp_path, label_column="star")


def test_a_context_column_is_kept_beside_the_text(tmp_path):
    path = tmp_path / "posts.csv"
    path.write_text("text,stars,about\n很好,5,酒店的早餐\n很差,1,\n", encoding="utf-8")
    source = find_source(str(path), options(tmp_path, label_column="stars", context_column="about", passage_chars=3))
    assert [(row.text, row.answer, row.context) for row in source.rows()] == [
        ("很好", "5", "酒店的"),
        ("很差", "1", None),
    ]
    with pytest.raises(UserError, match='has no column "abut"'):
        rows_of(path, tmp_path, label_column="stars", context_column="abut")
    with pytest.raises(UserError, match="--context-column about: a context belongs to a labelled text"):
        find_sources([str(path)], options(tmp_path, context_column="about"))


def test_a_label_column_keeps_the_pictures(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    path = tmp_path / "photos.jsonl"
    path.write_text(json.dumps({"text": "一只猫", "image": "a.png", "kind": "animal"}))
    source = find_source(str(path), options(tmp_path, label_column="kind"))
    assert source.kind == "image_text"
    assert [(row.text, row.image, row.answer) for row in source.rows()] == [("一只猫", png(), "animal")]


def test_the_command_builds_a_folder_once(folder, tmp_path):
    (folder / "a.txt").write_text("一只狗")
    (folder / "c.txt").write_text("一只猫")
    command = ["build", str(folder), "--out", str(tmp_path / "data"), "--licence", "CC0-1.0", "--max-bad-share", "0.5"]
    result = CliRunner().invoke(app, [*command, "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "is built" in result.output
    assert "photos: train 2, validation 0, test 0 rows" in result.output
    entry = Manifest.load(tmp_path / "data").sources["photos"]
    assert (entry.kind, entry.licence, entry.skipped) == ("image_text", "CC0-1.0", {"no caption": 1})
    assert "holds this data set already" in CliRunner().invoke(app, command).output
    (folder / "a.txt").write_text("一只狼")  # other contents are another data set
    assert isinstance(CliRunner().invoke(app, command).exception, UserError)


def test_the_cache_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "m6-recipes"
