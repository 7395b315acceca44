"""Inputs on a file server that is lost, or that change: the task ends, and nothing is left out in silence."""

import errno
import gzip
import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m6.corpus.plan import make_plan
from m6.corpus.reading import read_part, read_pictures, read_set
from m6.corpus.recipe import NamedSet
from m6.corpus.stages import run_task
from m6.corpus.work import prepare, work_folder
from m6.data.sources.base import Row
from m6.data.sources.local import unreadable_reason
from m6.errors import StorageError, UserError
from tests.fixtures.corpus import own, recipe_of, text_of, write_lines
from tests.fixtures.photographs import file_of, photograph, write_pairs


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of a file that is an input."""
    recipe = recipe_of(file.parent.parent / "data", own("web", file))
    plan = make_plan(recipe)
    return (row for part in plan.parts for row in read_part(recipe, plan, part, file.parent / "fetched"))


def rows_of_set(file: Path) -> Iterator[Row]:
    """The rows of a file that is a named set."""
    return read_set(NamedSet(name="questions", path=file))


def rows_of_pictures(file: Path) -> Iterator[Row]:
    """The rows of a file that is a named set of pictures."""
    return read_pictures(file, "pictures", "image")


def file_named(name: str, folder: Path) -> Path:
    """A whole file of this name."""
    file = folder / name
    if file.suffix == ".tar":
        write_pairs(file, [("a", "一张图片", file_of(photograph(0)))])
    elif file.suffix == ".parquet":
        pq.write_table(pa.table({"text": [text_of(0)], "image": [b""]}), file)
    else:
        write_lines(file, [text_of(n) for n in range(3)])
        if file.suffix == ".gz":
            file.write_bytes(gzip.compress(file.read_bytes()))
    return file


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.jsonl", rows_of),
        ("a.jsonl.gz", rows_of),
        ("a.warc", rows_of),
        ("a.parquet", rows_of),
        ("a.tar", rows_of),
        ("a.txt", rows_of),
        ("a.jsonl", rows_of_set),
        ("a.parquet", rows_of_set),
        ("a.tar", rows_of_pictures),
        ("a.png", rows_of_pictures),
        ("a.parquet", rows_of_pictures),
    ],
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_not_damaged(
    name: str, read: Callable[[Path], Iterator[Row]], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Lost(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def seek(self, offset: int, whence: int = 0) -> int:
            return 0

        def readinto(self, buffer: object) -> int:
            raise OSError(number, os.strerror(number))

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, "as pyarrow words it")

    file = file_named(name, tmp_path)
    rows = read(file)  # an input was read for its checksum
    monkeypatch.setattr(Path, "open", lambda *_, **__: io.BufferedReader(Lost()))
    monkeypatch.setattr(pq.ParquetFile, "__init__", fails)
    with pytest.raises(StorageError, match=rf"{name} cannot be read: {os.strerror(number)}$"):
        list(rows)


def test_a_picture_that_a_table_names_is_not_missing_where_the_server_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.png").write_bytes(file_of(photograph(0)))
    for number, message in ((errno.EIO, r"a\.png cannot be read: "), (errno.ESTALE, r"a\.png cannot be read: ")):

        def fails(*_: object, number: int = number, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", fails)
            with pytest.raises(StorageError, match=message):
                unreadable_reason(tmp_path, tmp_path / "a.png")
    assert unreadable_reason(tmp_path, tmp_path / "b.png") == "missing image"
    assert unreadable_reason(tmp_path, tmp_path / f"{'b' * 300}.png") == "missing image"


def test_a_tar_file_that_names_an_impossible_place_is_damaged(tmp_path: Path):
    header = bytearray(tarfile.TarInfo("a.jpg").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = tarfile.itn(1 << 62, 12, tarfile.GNU_FORMAT)  # the size
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(header))[0]
    (tmp_path / "a.tar").write_bytes(header)
    assert [row.problem for row in rows_of(tmp_path / "a.tar")] == ["the file is damaged (OSError)"]


@pytest.mark.parametrize("change", ["text", "time", "gone"])
@pytest.mark.parametrize("read", ["input", "set", "pictures"])
def test_a_file_that_changes_before_it_is_read_is_named(read: str, change: str, tmp_path: Path):
    write_lines(tmp_path / "web.jsonl", [text_of(n) for n in range(3)])
    write_lines(tmp_path / "set.jsonl", [text_of("set")])
    (tmp_path / "set.png").write_bytes(file_of(photograph(0)))
    paths = {"sets": "set.jsonl", "picture_sets": "set.png"}
    sets = {key: [{"name": key, "path": str(tmp_path / path)}] for key, path in paths.items()}
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web.jsonl"), decontamination=sets)
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe))

    def clean_and_index() -> None:
        for stage in ("clean", "pairs", "select", "held_out"):
            run_task(work.folder, stage, 0, 1)

    file = tmp_path / {"input": "web.jsonl", "set": "set.jsonl", "pictures": "set.png"}[read]
    if change == "text":
        file.write_bytes(file.read_bytes() + b" ")
    elif change == "time":
        os.utime(file, ns=(0, 0))
    else:
        file.unlink()
    with pytest.raises(UserError, match=rf"{file} has changed since the corpus was begun$"):
        clean_and_index()
    if change == "time":
        prepare(work.folder, make_plan(recipe))  # the same command: it has the contents of before
        clean_and_index()


def test_a_set_with_a_file_more_or_less_is_named(tmp_path: Path):
    for name in "ab":
        write_lines(tmp_path / "set" / f"{name}.jsonl", [text_of(name)])
    write_lines(tmp_path / "web.jsonl", [text_of(0)])
    sets = {"sets": [{"name": "questions", "path": str(tmp_path / "set")}]}
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web.jsonl"), decontamination=sets)
    plan, [named] = make_plan(recipe), recipe.decontamination.sets
    plan.check_set(named)
    message = "set has changed since the corpus was begun"
    (tmp_path / "set" / "c.jsonl").touch()
    with pytest.raises(UserError, match=message):
        plan.check_set(named)
    (tmp_path / "set" / "c.jsonl").unlink()
    (tmp_path / "set" / "b.jsonl").unlink()
    with pytest.raises(UserError, match=message):
        plan.check_set(named)
