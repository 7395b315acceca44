"""Data sets that save_to_disk wrote: their names lead nowhere else, and how their user saw the rows does not matter."""

import json
import os
import shutil
import struct
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from m6.data.build import BuildSettings, build
from m6.data.sources import Row, SourceOptions, find_source
from m6.errors import UserError


def saved(folder: Path, text: str = "公开", splits: tuple[str, ...] = ()) -> Path:
    data = datasets.Dataset.from_dict({"text": [text], "number": [1]})
    (datasets.DatasetDict(dict.fromkeys(splits, data)) if splits else data).save_to_disk(str(folder))
    return folder


def read(path: Path) -> list[Row]:
    source = find_source(f"mine={path}", SourceOptions(cache=path, licence="private"))
    source.origin()
    return list(source.rows())


def change(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


ARROW = "data-00000-of-00001.arrow"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    return saved(tmp_path / "private", "秘密", ("train", "test"))


@pytest.mark.parametrize(
    "name", [f"../private/train/{ARROW}", "{private}", f"a/../../private/train/{ARROW}", "link.arrow"]
)
@pytest.mark.parametrize("splits", [(), ("train", "test")])
def test_files_of_a_state_are_in_its_folder(name: str, splits: tuple[str, ...], private: Path, tmp_path: Path):
    folder = saved(tmp_path / "mine", splits=splits)
    part = folder / "train" if splits else folder
    (part / "link.arrow").symlink_to(private / "train" / ARROW)
    (part / "a").mkdir()
    name = name.format(private=private / "train" / ARROW)
    if splits and name.startswith(("..", "a/..")):
        name = name.replace("../private", "../../private")
    change(part / "state.json", _data_files=[{"filename": name}])
    with pytest.raises(UserError, match=r"state\.json names .* which is not read \(outside of the folder\)"):
        read(folder)


def test_a_split_does_not_name_the_files_of_another(tmp_path: Path):
    folder = saved(tmp_path / "mine", splits=("train", "test"))
    change(folder / "train" / "state.json", _data_files=[{"filename": f"../test/{ARROW}"}])
    with pytest.raises(UserError, match="outside of the folder"):
        read(folder)


@pytest.mark.parametrize("split", ["../private/train", "{private}/train", "link"])
def test_splits_are_in_the_folder(split: str, private: Path, tmp_path: Path):
    folder = saved(tmp_path / "mine", splits=("train", "test"))
    (folder / "link").symlink_to(private / "train")
    change(folder / "dataset_dict.json", splits=["train", split.format(private=private)])
    with pytest.raises(UserError, match=r"dataset_dict\.json names the split .*\(outside of the folder\)"):
        read(folder)


def test_a_linked_split_with_a_state_that_is_inside(private: Path, tmp_path: Path):
    """The state of a folder outside may be a link back into this one."""
    folder = saved(tmp_path / "mine", splits=("train", "test"))
    (private / "train" / "state.json").unlink()
    (private / "train" / "state.json").symlink_to(folder / "train" / "state.json")
    (folder / "link").symlink_to(private / "train")
    change(folder / "dataset_dict.json", splits=["link"])
    with pytest.raises(UserError, match="outside of the folder"):
        read(folder)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": []}, '"mine" is empty'),
        ({"_data_files": None}, 'expected "_data_files" with a list of objects'),
        ({"_data_files": 3}, 'expected "_data_files" with a list of objects'),
        ({"_data_files": ["a"]}, 'expected "_data_files" with a list of objects'),
        ({"_data_files": [{}]}, 'expected "filename" with a name'),
        ({"_data_files": [{"filename": 3}]}, 'expected "filename" with a name'),
        ({"_data_files": [{"filename": ""}]}, "not a regular file"),
        ({"_data_files": [{"filename": "a\x00b"}]}, "missing file"),
        ({"_data_files": [{"filename": "x" * 5000}]}, "missing file"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "names a selection of rows"),
    ],
)
def test_a_state_that_names_nothing(state: dict[str, object], message: str, tmp_path: Path):
    folder = saved(tmp_path / "mine")
    change(folder / "state.json", **state)
    with pytest.raises(UserError, match=message):
        read(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"splits": 3}', b'{"splits": [3]}'])
@pytest.mark.parametrize("name", ["dataset_dict.json", "state.json"])
def test_damaged_descriptions(name: str, content: bytes, tmp_path: Path):
    folder = saved(tmp_path / "mine", splits=("train",) if name == "dataset_dict.json" else ())
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        read(folder)


def test_a_description_that_is_a_pipe_does_not_block(tmp_path: Path):
    folder = saved(tmp_path / "mine", splits=("train",))
    (folder / "train" / "state.json").unlink()
    os.mkfifo(folder / "train" / "state.json")
    with pytest.raises(UserError, match="not a regular file"):
        read(folder)


@pytest.mark.parametrize("cut", [0, 5, 300])
def test_a_damaged_arrow_file_is_named(cut: int, tmp_path: Path):
    folder = saved(tmp_path / "mine")
    (folder / ARROW).write_bytes((folder / ARROW).read_bytes()[:cut])
    with pytest.raises(UserError, match=ARROW):
        read(folder)


def test_offsets_that_lead_out_of_a_file_are_found(tmp_path: Path):
    folder = tmp_path / "mine"
    datasets.Dataset.from_dict({"text": ["猫" * 40, "狗"]}).save_to_disk(str(folder))
    content = (folder / ARROW).read_bytes()
    offsets = struct.pack("<iii", 0, 120, 123)
    assert content.count(offsets) == 1
    (folder / ARROW).write_bytes(content.replace(offsets, struct.pack("<iii", 0, 1 << 30, 123)))
    with pytest.raises(UserError, match="reading stopped at row 0"):
        read(folder)


@pytest.mark.parametrize(
    "seen_as",
    [
        ("numpy", {"dtype": "float32"}),
        ("torch", {}),
        ("jax", {}),
        ("numpy", {"columns": ["number"]}),
        ("nonsense", {"a": 1}),
    ],
)
def test_the_format_in_which_the_rows_were_seen(seen_as: tuple[str, dict[str, object]], tmp_path: Path):
    folder = saved(tmp_path / "mine")
    kind, arguments = seen_as
    columns = arguments.pop("columns", None) if "columns" in arguments else None
    change(folder / "state.json", _format_type=kind, _format_kwargs=arguments, _format_columns=columns)
    assert [row.text for row in read(folder)] == ["公开"]


def test_a_format_of_numpy_as_it_is_saved(tmp_path: Path):
    data = datasets.Dataset.from_dict({"text": ["一", "二"], "number": [1, 2]}).with_format("numpy", dtype="float32")
    data.save_to_disk(str(tmp_path / "mine"))
    assert [row.text for row in read(tmp_path / "mine")] == ["一", "二"]


def test_an_empty_split_beside_a_full_one(tmp_path: Path):
    folder = saved(tmp_path / "mine", splits=("train", "test"))
    change(folder / "test" / "state.json", _data_files=[])
    assert [(row.text, row.split) for row in read(folder)] == [("公开", "train")]


def test_splits_whose_names_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = saved(tmp_path / "mine", splits=("unsupervised", "all", "test"))
    assert [row.split for row in read(folder)] == [None, None, "test"]
    assert 'the name of its split "all" does not say train, validation or test' in capsys.readouterr().err
    with pytest.raises(UserError, match="of its splits train, training two have the same meaning"):
        read(saved(tmp_path / "twice", splits=("train", "training")))


def test_files_that_no_state_names_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = saved(tmp_path / "mine")
    shutil.copy(folder / ARROW, folder / "old.arrow")
    shutil.copy(folder / ARROW, folder / "cache-0123abcd.arrow")  # of a map()
    assert len(read(folder)) == 1
    assert "1 .arrow files that no state.json names are not read, such as old.arrow" in capsys.readouterr().err


def test_a_path_of_a_saved_picture_is_not_followed(tmp_path: Path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    folder = saved(tmp_path / "mine")
    for path in (str(secret), "../secret.png", "secret.png"):
        table = pa.table({"text": ["猫"], "image": pa.array([{"bytes": None, "path": path}], kind)})
        with pa.OSFile(str(folder / ARROW), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        assert [(row.image, row.problem) for row in read(folder)] == [(None, "the image is a path")]


def test_a_build_of_foreign_rows_writes_nothing(private: Path, tmp_path: Path):
    folder = saved(tmp_path / "mine")
    change(folder / "state.json", _data_files=[{"filename": f"../private/train/{ARROW}"}])
    with pytest.raises(UserError):
        build([find_source(str(folder), SourceOptions(cache=tmp_path, licence="x"))], tmp_path / "out", BuildSettings())
    assert not (tmp_path / "out").exists()
