"""Names of the user's own folders and files: which are splits, and which only look like it."""

import json
import tarfile
from pathlib import Path, PurePath

import datasets
import pytest

from m6.data.sources import find_source
from m6.data.sources.local import split_of_file
from tests.unit.data.test_local import options, own_cache, png

__all__ = ["own_cache"]  # a fixture that every test here uses


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.jsonl", "train"),
        ("Dev.CSV", "validation"),
        ("test-0000.tar", "test"),
        ("train_3.jsonl.gz", "train"),
        ("eval-00000-of-00002.parquet", "test"),
        ("validation-00000-of-00001-0a1b2c3d4e5f6071.parquet", "validation"),
        ("ab_test_results.csv", None),
        ("dev-ops.jsonl", None),
        ("test1.csv", None),
        ("data_train.csv", None),
        ("trainers.csv", None),
    ],
)
def test_the_whole_name_of_a_file_counts(name: str, split: str | None):
    assert split_of_file(PurePath(name), {}) == split


def test_a_class_may_be_named_after_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name in ("train", "bus"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "a.png").write_bytes(png())
    source = find_source(str(tmp_path / "photos"), options(tmp_path))
    assert source.own_splits == frozenset()
    assert {(row.text, row.answer, row.split) for row in source.rows()} == {
        ("train", "train", None),
        ("bus", "bus", None),
    }
    assert '"photos": its folders are no splits, although "train" is named after one: "bus" is not' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        (("train2017", "val2017"), {"train", "validation"}),
        (("data_train", "data_test"), {"train", "test"}),
        (("test2017", "val2017"), {None}),
        (("train2017", "more"), {None}),
    ],
)
def test_words_that_all_folders_have_are_no_chance(
    tmp_path: Path, folders: tuple[str, str], splits: set[str | None], capsys: pytest.CaptureFixture[str]
):
    for name in folders:
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "a.png").write_bytes(png())
        (tmp_path / "photos" / name / "a.txt").write_text(f"一只{name}")
    assert {row.split for row in find_source(str(tmp_path / "photos"), options(tmp_path)).rows()} == splits
    assert ("its folders are no splits" in capsys.readouterr().err) == (splits == {None})


def test_a_topic_of_texts_may_be_named_after_a_split(tmp_path: Path):
    for name in ("dev-ops", "dev", "soup"):
        (tmp_path / "notes" / name).mkdir(parents=True)
        (tmp_path / "notes" / name / "x.md").write_text(f"关于{name}。")
    source = find_source(str(tmp_path / "notes"), options(tmp_path))
    assert source.own_splits == frozenset()
    assert {row.split for row in source.rows()} == {None}


@pytest.mark.parametrize("form", ["csv", "tar"])
def test_a_file_with_a_word_of_a_split_is_named(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / f"ab_test_results.{form}"
    if form == "csv":
        file.write_text("text\n好\n")
    else:
        with tarfile.open(file, "w"):
            pass
    assert find_source(f"mine={file}", options(tmp_path)).own_splits == frozenset()
    assert f'"mine": {file.name} is not taken for the split test; if it is, name it test.{form}' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("data_train.jsonl", "data_test.jsonl"), {"train", "test"}),
        (("data_train.jsonl", "data_test.jsonl", "data_more.jsonl"), {None}),
        (("a_test.jsonl", "b_test.jsonl"), {None}),
    ],
)
def test_words_that_all_files_have_are_no_chance(tmp_path: Path, names: tuple[str, ...], splits: set[str | None]):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(json.dumps({"text": name}))
    assert {row.split for row in find_source(str(folder), options(tmp_path)).rows()} == splits


def test_a_file_of_its_own_may_be_a_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "test.jsonl"
    file.write_text(json.dumps({"text": "好"}))
    source = find_source(f"mine={file}", options(tmp_path))
    assert [row.split for row in source.rows()] == ["test"]
    assert not capsys.readouterr().err


def test_splits_of_a_saved_data_set_may_have_longer_names(tmp_path: Path):
    parts = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "validation_matched")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    rows = find_source(str(tmp_path / "saved"), options(tmp_path)).rows()
    assert {(row.text, row.split) for row in rows} == {("train", "train"), ("validation_matched", "validation")}
