"""Values of tables by their types: written as texts where rows need labels, refused for what they are elsewhere."""

import datetime
import decimal
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m6.data.sources import Row, SourceOptions, find_source
from m6.data.sources.local import label_of_row


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    return buffer.getvalue()


def read(path: Path, **options: object) -> list[Row]:
    source = find_source(f"mine={path}", SourceOptions(cache=path, licence="private", **options))
    source.origin()
    return list(source.rows())


def metadata(folder: Path, text: str) -> Path:
    (folder / "metadata.jsonl").write_text(f'{{"file_name": "a.png", "text": {text}}}')
    (folder / "a.png").write_bytes(png())
    return folder


def jsonl(folder: Path, text: str) -> Path:
    (folder / "rows.jsonl").write_text(f'{{"image": "a.png", "text": {text}}}')
    (folder / "a.png").write_bytes(png())
    return folder


def tar(folder: Path, text: str) -> Path:
    with tarfile.open(folder / "rows.tar", "w") as file:
        for name, content in (("a.png", png()), ("a.json", f'{{"text": {text}}}'.encode())):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return folder


@pytest.mark.parametrize("form", [metadata, jsonl, tar])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("7", "int"),
        ("7.5", "float"),
        ("NaN", "nan"),
        ("true", "bool"),
        ("[]", "list"),
        ('["a"]', "list"),
        ("{}", "dict"),
    ],
)
def test_a_caption_that_is_no_text_is_not_called_empty(form: Any, text: str, problem: str, tmp_path: Path):
    folder = tmp_path / "mine"
    folder.mkdir()
    assert [row.problem for row in read(form(folder, text))] == [f"the text is {problem}"]


EQUAL = [1, 1.0, True, decimal.Decimal("1.00")]
DIFFERENT = [0, 2, "1.0", "01", "true", 1.5, -1, 10**30, "1e30", decimal.Decimal("1.50000001"), 1e-7, None]


def test_equal_labels_are_one_class():
    options = SourceOptions(cache=Path(), label_column="label")
    assert {label_of_row({"label": value}, options) for value in EQUAL} == {"1"}
    assert len({label_of_row({"label": value}, options) for value in [*EQUAL, *DIFFERENT]}) == 1 + len(DIFFERENT)
    for same in (
        [0, 0.0, -0.0, False],
        [1.5, decimal.Decimal("1.500")],
        [10**22, 1e22],
        [0.25, decimal.Decimal("0.25")],
    ):
        assert len({label_of_row({"label": value}, options) for value in same}) == 1


def test_labels_of_json_that_are_equal_numbers(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(f'{{"text": "第{n}句", "label": {v}}}\n' for n, v in enumerate(("1", "1.0", "true", '"1"')))
    )
    assert [row.answer for row in read(path, label_column="label")] == ["1"] * 4


LABELS: list[tuple[pa.DataType, list[Any], list[str | None]]] = [
    (pa.int8(), [1, None], ["1", None]),
    (pa.uint64(), [2**64 - 1, 0], ["18446744073709551615", "0"]),
    (pa.float16(), [0.5, 1.0], ["0.5", "1"]),
    (pa.float64(), [0.1, 3.0], ["0.1", "3"]),
    (pa.bool_(), [True, False], ["1", "0"]),
    (pa.decimal128(10, 2), [decimal.Decimal("1.50"), decimal.Decimal("2.00")], ["1.5", "2"]),
    (pa.string(), ["a", ""], ["a", None]),
    (pa.large_string(), ["a", "b"], ["a", "b"]),
    (pa.string_view(), ["a", "b"], ["a", "b"]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b"], ["a", "b"]),
    (pa.date32(), [datetime.date(2024, 1, 2)] * 2, ["2024-01-02"] * 2),
    (pa.timestamp("ms"), [datetime.datetime(2024, 1, 2, 3)] * 2, ["2024-01-02 03:00:00"] * 2),
    (pa.null(), [None, None], [None, None]),
]


@pytest.mark.parametrize(("kind", "values", "labels"), LABELS, ids=[str(kind) for kind, _, _ in LABELS])
@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_labels_of_every_type(
    form: str, kind: pa.DataType, values: list[Any], labels: list[str | None], tmp_path: Path
):
    table = pa.table({"text": ["一", "二"], "label": pa.array(values, kind)})
    path = write(table, form, tmp_path)
    assert [(row.text, row.answer, row.problem) for row in read(path, label_column="label")] == [
        ("一", labels[0], None),
        ("二", labels[1], None),
    ]


def write(table: pa.Table, form: str, folder: Path) -> Path:
    if form == "parquet":
        pq.write_table(table, folder / "mine.parquet")
        return folder / "mine.parquet"
    datasets.Dataset.from_dict({"text": [""]}).save_to_disk(str(folder / "mine"))
    [file] = (folder / "mine").glob("*.arrow")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return folder / "mine"


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_texts_of_every_type_of_text(form: str, kind: pa.DataType, tmp_path: Path):
    path = write(pa.table({"text": pa.array(["一", None], kind)}), form, tmp_path)
    assert [(row.text, row.problem) for row in read(path)] == [("一", None), ("", "the text is null")]


NO_TEXTS: list[tuple[pa.Array, str]] = [
    (pa.array([1]), "the text is int"),
    (pa.array([b"a"]), "the text is bytes"),
    (pa.array([["a"]]), "the text is list"),
    (pa.array([{"a": 1}]), "the text is dict"),
    (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), "the text is list"),
    (pa.array([datetime.date(2024, 1, 2)]), "the text is date"),
    (pa.array([10**15], pa.timestamp("ms")), "the text is a timestamp[ms] without a value (OverflowError)"),
    (pa.array([b"\xff"], pa.binary()).view(pa.string()), "the text is not UTF-8"),
]


@pytest.mark.parametrize(("array", "problem"), NO_TEXTS, ids=[problem for _, problem in NO_TEXTS])
def test_what_is_no_text_is_called_what_it_is(array: pa.Array, problem: str, tmp_path: Path):
    table = pa.table({"text": array.cast(array.type), "other": [1]})
    assert [row.problem for row in read(write(table, "parquet", tmp_path))] == [problem]


@pytest.mark.parametrize(("value", "kind"), [("[1]", "list"), ("NaN", "nan"), ("-Infinity", "-inf"), ("{}", "dict")])
@pytest.mark.parametrize("role", ["label", "group"])
def test_labels_that_are_no_values(role: str, value: str, kind: str, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "好", "{role}": {value}}}')
    assert [row.problem for row in read(path, **{f"{role}_column": role})] == [f"the {role} is {kind}"]


def test_a_class_without_a_name_is_no_class(tmp_path: Path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    data = datasets.Dataset.from_dict({"text": ["一", "二"], "label": [1, 0]}, features=features)
    table = data.data.table.set_column(1, "label", pa.array([7, -1]))
    path = write(table.replace_schema_metadata(data.data.table.schema.metadata), "parquet", tmp_path)
    rows = [(row.answer, row.problem) for row in read(path, label_column="label")]
    assert rows == [(None, "the label is number 7 of 2 classes"), (None, None)]


@pytest.mark.parametrize(
    ("value", "problem"),
    [(json.dumps("../x.png"), "outside of the folder"), ("3", "the image is int"), ("[1]", "the image is list"),
     ("0", "the image is int"), ("[]", "the image is list"),
     ('{"data": "x.png"}', "the image is dict without bytes and path"),
     ('{"path": "/etc/passwd"}', "outside of the folder"), ('{"bytes": null, "path": null}', "missing image"),
     ('""', "missing image"), ("null", "missing image"), ('"."', "not a regular file")],
)  # fmt: skip
def test_images_that_are_none(value: str, problem: str, tmp_path: Path):
    (tmp_path / "x.png").write_bytes(png())
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(f'{{"text": "好", "image": {value}}}')
    assert [row.problem for row in read(folder)] == [problem]


def test_pictures_inside_of_lists_are_not_opened(tmp_path: Path):
    """Hugging Face Datasets would decode them, and open the files that they name."""
    secret = tmp_path / "secret.png"
    features = datasets.Features({"text": datasets.List(datasets.Image())})
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"text": pa.array([[{"bytes": None, "path": str(secret)}]], kind)})
    table = table.replace_schema_metadata(features.arrow_schema.metadata)
    assert [row.problem for row in read(write(table, "parquet", tmp_path))] == ["the text is list"]


def test_a_file_name_that_is_no_text(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "一"}\n{"file_name": 3, "text": "二"}')
    assert [row.problem for row in read(tmp_path)] == [None, "the file_name is int"]
