"""Tables of the user's own data: JSONL, CSV, Parquet and the Hub."""

import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m6.data.sources import find_source
from m6.errors import UserError
from tests.unit.data.test_local import options, own_cache, png, rows_of

__all__ = ["own_cache"]  # a fixture that every test here uses


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


@pytest.mark.parametrize(
    ("splits", "meant"),
    [
        ("", [None]),
        (":train", ["train"]),
        (":test", ["test"]),
        (":train+validation_matched", ["train", "validation"]),
        (":unsupervised", [None]),
    ],
)
def test_a_split_of_the_hub_keeps_its_meaning(splits, meant, tmp_path, monkeypatch, capsys):
    import datasets
    import huggingface_hub

    class Info:
        sha = "abc123"
        card_data = {"license": "mit"}  # noqa: RUF012

    def load_dataset(path, split, **arguments):
        return datasets.Dataset.from_dict({"text": [split]}).to_iterable_dataset()

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: Info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = find_source(f"hf:owner/news{splits}", options(tmp_path))
    names = (splits.removeprefix(":") or "train").split("+")
    assert source.own_splits == set(filter(None, meant))
    assert [(row.text, row.split) for row in source.rows()] == list(zip(names, meant, strict=True))
    noted = 'note: "news": the name of its split "unsupervised" does not say train, validation or test'
    assert (noted in capsys.readouterr().err) == (splits == ":unsupervised")


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
