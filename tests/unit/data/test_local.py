"""The user's own data: folders, tables, tars and the Hub."""

import csv
import io
import json
import pickle
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
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
        ("photos/a.png", "", None),
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
        ("shard-0/shard-0.tar/0004", "", False, "invalid JSON"),
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


def test_jsonl_pictures_are_paths_inside_the_folder(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png())
    lines = [{"text": "狗", "image": "a.png"}, {"text": "外", "image": "../secret.png"}]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = find_source(f"pets={folder / 'pairs.jsonl'}", options(tmp_path))
    assert (source.name, source.kind) == ("pets", "image_text")
    assert [(row.text, row.image, row.problem) for row in source.rows()] == [
        ("狗", png(), None),
        ("外", None, "outside of the folder"),
    ]


@pytest.mark.parametrize("layout", ["bytes", "struct", "hugging face"])
def test_parquet_pictures(tmp_path, layout):
    pictures = [png(), b"damaged"]
    path = tmp_path / "pairs.parquet"
    if layout == "bytes":
        pq.write_table(pa.table({"text": ["狗", "猫"], "image": pa.array(pictures, pa.binary())}), path)
    elif layout == "struct":
        structs = [{"bytes": picture, "path": None} for picture in pictures]
        kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        pq.write_table(pa.table({"text": ["狗", "猫"], "image": pa.array(structs, kind)}), path)
    else:
        import datasets

        features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
        data = {"text": ["狗", "猫"], "image": [{"bytes": picture, "path": None} for picture in pictures]}
        datasets.Dataset.from_dict(data, features=features).to_parquet(str(path))
    # The damaged picture arrives undecoded: the build will skip that row alone.
    assert [(row.text, row.image) for row in rows_of(path, tmp_path)] == list(zip(["狗", "猫"], pictures, strict=True))


def test_a_damaged_table_is_a_users_error(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match="bad cannot be opened"):
        rows_of(tmp_path / "bad.parquet", tmp_path)


def test_the_hub_is_read_at_a_commit_and_runs_no_code(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    calls = []

    class Info:
        sha = "abc123"
        card_data = {"license": "mit"}  # noqa: RUF012

    def load_dataset(path, **arguments):
        calls.append((path, arguments))
        return datasets.Dataset.from_dict({"text": ["你好。"]}).to_iterable_dataset()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: Info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = find_source("hf:owner/news.zh:test", options(tmp_path, licence=None))
    assert (source.name, source.kind) == ("news", "text")
    assert source.origin()[0].model_dump(exclude_none=True) == {
        "package": "hf:owner/news.zh:test",
        "version": "abc123",
        "licence": "mit",
        "columns": {"text": "text"},
    }
    assert [row.text for row in source.rows()] == ["你好。"]
    assert calls == [("owner/news.zh", {"streaming": True, "split": "test", "revision": "abc123"})]
    Info.card_data = None
    with pytest.raises(UserError, match="states no licence"):
        find_source("hf:owner/news", options(tmp_path, licence=None))


def test_a_hub_that_cannot_be_reached_is_a_users_error(tmp_path, monkeypatch):
    import huggingface_hub

    def offline(self, name):
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    with pytest.raises(UserError, match="hf:owner/news cannot be opened: offline mode is enabled"):
        find_source("hf:owner/news", options(tmp_path))


def test_pictures_of_a_table_are_beside_its_file(tmp_path):
    for colour in ("red", "blue"):
        folder = tmp_path / "set" / colour
        folder.mkdir(parents=True)
        (folder / "1.png").write_bytes(png(colour))
        (folder / "rows.jsonl").write_text(json.dumps({"text": colour, "image": "1.png"}))
    rows = rows_of(tmp_path / "set", tmp_path)
    assert [(row.id, row.text, row.image) for row in rows] == [
        ("set/0", "blue", png("blue")),
        ("set/1", "red", png("red")),
    ]


def test_a_changed_picture_of_a_table_or_name_of_a_folder_is_other_data(tmp_path):
    def checksum():
        return find_source(str(tmp_path / "set"), options(tmp_path)).origin()[0].sha256

    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(png())
    (folder / "rows.jsonl").write_text(json.dumps({"text": "猫", "image": "a.png"}))
    before = checksum()
    (folder / "a.png").write_bytes(png("blue"))
    changed = checksum()
    folder.rename(tmp_path / "set" / "test")
    assert len({before, changed, checksum()}) == 3


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "tar"])
def test_folders_of_tables_and_tars_are_splits(form, tmp_path):
    for split in ("train", "test"):
        folder = tmp_path / "set" / split
        folder.mkdir(parents=True)
        if form == "jsonl":
            (folder / "0.jsonl").write_text(json.dumps({"text": split}))
        elif form == "csv":
            (folder / "0.csv").write_text(f"text\n{split}\n")
        elif form == "parquet":
            pq.write_table(pa.table({"text": [split]}), folder / "0.parquet")
        else:
            with tarfile.open(folder / "0.tar", "w") as tar:
                for name, content in (("0.png", png()), ("0.txt", split.encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    source = find_source(str(tmp_path / "set"), options(tmp_path))
    assert source.own_splits == {"train", "test"}
    rows = list(source.rows())
    assert sorted((row.text, row.split) for row in rows) == [("test", "test"), ("train", "train")]
    assert len({row.id for row in rows}) == 2


def test_cells_of_csv_are_texts(tmp_path):
    path = tmp_path / "posts.CSV"
    path.write_text("text,stars\nNA,1\nnull,01\n很差,\n,3\n")
    rows = [(row.text, row.answer, row.problem) for row in rows_of(path, tmp_path, label_column="stars")]
    assert rows == [("NA", "1", None), ("null", "01", None), ("很差", None, None), ("", None, "the text is null")]


def test_suffixes_of_tables_may_differ_in_case(tmp_path):
    (tmp_path / "set").mkdir()
    for name in ("a.JSONL", "b.jsonl"):
        (tmp_path / "set" / name).write_text(json.dumps({"text": name}))
    assert [row.text for row in rows_of(tmp_path / "set", tmp_path)] == ["a.JSONL", "b.jsonl"]


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
