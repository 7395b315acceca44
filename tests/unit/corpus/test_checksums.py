"""Checksums of inputs: made once, also by a launch that is interrupted, and after what can be refused without them."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from m6 import files
from m6.corpus import inputs
from m6.corpus.inputs import Checksums
from m6.corpus.launch import make_corpus
from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.work import work_folder
from m6.errors import UserError
from tests.fixtures.corpus import own, recipe_of, text_of, write_lines

sha256 = files.sha256


@pytest.fixture
def recipe(tmp_path: Path) -> CorpusRecipe:
    for name in "abcd":
        write_lines(tmp_path / "web" / f"{name}.jsonl", [text_of(name)])
    return recipe_of(tmp_path / "data", own("web", tmp_path / "web"))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Lists which inputs are read from now on, one at a time; the file server is lost at the one that is named."""
    monkeypatch.setattr(inputs, "_AT_ONCE", 1)

    def listed(lost: str = "") -> list[str]:
        names: list[str] = []

        def reads(path: Path) -> str:
            if path.suffix == ".jsonl":
                names.append(path.name)
            if path.name == lost:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return sha256(path)

        monkeypatch.setattr(files, "sha256", reads)
        return names

    return listed


def test_an_interrupted_launch_goes_on_with_the_file_that_it_had_come_to(
    recipe: CorpusRecipe, read: Callable[[str], list[str]]
):
    before = read("d.jsonl")
    with pytest.raises(OSError, match="Input/output error"):
        make_corpus(recipe, "local", 1)
    assert before == ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    record = work_folder(recipe.out) / "checksums.jsonl"
    record.write_bytes(record.read_bytes()[:-5])  # a crash cut the entry of c off
    afterwards = read("")
    make_corpus(recipe, "local", 1)
    assert afterwards == ["c.jsonl", "d.jsonl"]
    assert not record.exists()


def test_another_size_or_time_is_another_file(recipe: CorpusRecipe, tmp_path: Path, read: Callable[[str], list[str]]):
    record = tmp_path / "record.jsonl"
    plan = make_plan(recipe, Checksums(record=record))
    write_lines(tmp_path / "web" / "b.jsonl", [text_of("more"), text_of("b")])
    os.utime(tmp_path / "web" / "d.jsonl", ns=(0, 0))
    names = read("")
    again = make_plan(recipe, Checksums(record=record))
    assert names == ["b.jsonl", "d.jsonl"]
    is_same = [old.sha256 == new.sha256 for old, new in zip(plan.files, again.files, strict=True)]
    assert is_same == [True, False, True, True]


def test_several_at_a_time_have_the_order_of_one(tmp_path: Path):
    paths = [tmp_path / f"{number}.txt" for number in range(40)]
    for path in paths:
        path.write_text(path.name)
    record = tmp_path / "record.jsonl"
    entries = Checksums(record=record).entries(paths)
    assert [(entry.path, entry.sha256) for entry in entries] == [(str(path), sha256(path)) for path in paths]
    assert len(record.read_text().splitlines()) == len(paths)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("sets", "太短了。", "would protect nothing"),
        ("sets", None, r"decontamination\.sets: .*set: expected files"),
        ("picture_sets", None, r"decontamination\.picture_sets: .*set: expected pictures"),
    ],
)
def test_a_set_is_refused_before_inputs_are_read(
    key: str, text: str | None, message: str, recipe: CorpusRecipe, tmp_path: Path, read: Callable[[str], list[str]]
):
    (tmp_path / "set").mkdir()
    if text is not None:
        write_lines(tmp_path / "set" / "a.jsonl", [text])
    named = {key: [{"name": "named", "path": str(tmp_path / "set")}]}
    names = read("")
    with pytest.raises(UserError, match=message):
        make_corpus(recipe_of(recipe.out, own("web", tmp_path / "web"), decontamination=named), "local", 1)
    assert names == []
