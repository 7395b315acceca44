"""Labels, contexts and groups of tables: names of classes, and values that are none."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m6.data.build import BuildSettings, build
from m6.data.reader import open_split
from m6.data.sources import find_source
from tests.unit.data.test_local import options, own_cache, png, rows_of

__all__ = ["own_cache"]  # a fixture that every test here uses

FEATURES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "stars": datasets.ClassLabel(names=["bad", "good"]),
        "part": datasets.ClassLabel(names=["train", "test"]),
    }
)


@pytest.mark.parametrize("form", ["parquet", "saved", "hub"])
def test_labels_of_hugging_face_become_their_names(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = {"text": ["一", "二", "三", "四"], "stars": [1, 0, None, -1], "part": [0, 1, 0, 0]}
    data = datasets.Dataset.from_dict(rows, features=FEATURES)
    source = f"mine={tmp_path / 'mine'}"
    if form == "parquet":
        data.to_parquet(str(tmp_path / "mine.parquet"))
        source += ".parquet"
    elif form == "saved":
        data.save_to_disk(str(tmp_path / "mine"))
    else:
        import huggingface_hub

        class Info:
            sha, card_data = "abc123", None

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: Info)
        monkeypatch.setattr(datasets, "load_dataset", lambda path, **arguments: data.to_iterable_dataset())
        source = "hf:owner/mine"
    read = rows_of(source, tmp_path, label_column="stars", split_column="part")
    assert [(row.text, row.answer, row.split) for row in read] == [
        ("一", "good", "train"),
        ("二", "bad", "test"),
        ("三", None, "train"),
        ("四", None, "train"),
    ]


def test_captions_may_be_classes(tmp_path: Path):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["猫", "狗"])})
    rows = {"image": [{"bytes": png(), "path": None}], "label": [1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "pets.parquet"))
    [row] = rows_of(tmp_path / "pets.parquet", tmp_path, text_column="label")
    assert (row.text, row.problem) == ("狗", None)


def write_table(entries: list[dict[str, Any]], form: str, folder: Path) -> Path:
    path = folder / f"mine.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(entries), path)
    else:
        path.write_text("\n".join(map(json.dumps, entries)))
    return path


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("role", ["label", "context", "group"])
def test_lists_are_no_values(role: str, form: str, tmp_path: Path):
    entry = {"text": "好", "label": "a", "context": "b", "group": "c"}
    path = write_table([{**entry, role: [entry[role]]}], form, tmp_path)
    columns = {"label_column": "label", "context_column": "context", "group_column": "group"}
    assert [row.problem for row in rows_of(path, tmp_path, **columns)] == [f"the {role} is list"]


def test_lists_are_no_labels_of_pictures(tmp_path: Path):
    entry = {"text": "好", "label": {"a": 1}}
    (tmp_path / "a.png").write_bytes(png())
    table = write_table([{**entry, "image": "a.png"}], "jsonl", tmp_path)
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (folder / "metadata.jsonl").write_text(json.dumps({**entry, "file_name": "a.png"}))
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for name, content in (("a.png", png()), ("a.json", json.dumps(entry).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    for path in (table, folder, tmp_path / "rows.tar"):
        assert [row.problem for row in rows_of(path, tmp_path, label_column="label")] == ["the label is dict"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_blanks_are_no_values(form: str, tmp_path: Path):
    entries = [{"text": f"第{number}句", "label": "", "context": " ", "group": ""} for number in range(2)]
    columns = {"label_column": "label", "context_column": "context", "group_column": "group"}
    path = write_table(entries, form, tmp_path)
    rows = list(find_source(str(path), options(tmp_path, **columns)).rows())
    assert [(row.answer, row.context) for row in rows] == [(None, None)] * 2
    assert len({row.group for row in rows}) == 2


def test_labelled_texts_that_are_cut_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    entries = [
        {"text": "好" * 20, "label": "a", "context": "b"},
        {"text": "一" * 10, "label": "b", "context": "二" * 11},
        {"text": "一" * 10, "label": "a", "context": "三" * 10},
        {"text": "四" * 30, "label": None, "context": None},
    ]
    path = write_table(entries, "jsonl", tmp_path)
    source = find_source(str(path), options(tmp_path, passage_chars=10, label_column="label", context_column="context"))
    settings = BuildSettings(passage_chars=10, validation_share=0.0, test_share=0.0, max_bad_share=0.3)
    manifest, _ = build([source], tmp_path / "out", settings)
    assert [(row["text"], row["context"]) for row in open_split(manifest, "mine", "train")] == [
        ("好" * 10, "b"),
        ("一" * 10, "二" * 10),
        ("一" * 10, "三" * 10),
    ]
    assert "mine: 2 labelled texts or contexts were cut to 10 characters (--passage-chars)" in capsys.readouterr().err
