"""The sets that a recipe names: none is without effect in silence."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m6.corpus.launch import make_corpus
from m6.corpus.output import load_record
from m6.corpus.plan import make_plan
from m6.corpus.stages import run_task
from m6.corpus.work import prepare, work_folder
from m6.errors import UserError
from tests.fixtures.command import m6
from tests.fixtures.corpus import own, recipe_of, text_of, write_lines
from tests.fixtures.photographs import file_of, photograph


def write_set(form: str, column: str, texts: list[str], folder: Path) -> Path:
    file = folder / f"set.{form}"
    if form == "jsonl":
        file.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    else:
        pq.write_table(pa.table({column: texts}), file)
    return file


@pytest.mark.parametrize(
    ("form", "column", "texts", "reason"),
    [
        ("jsonl", "sentence", [text_of("a"), text_of("b")], "the text is null: 2"),
        ("parquet", "sentence", [text_of("a")], 'no column "text": 1'),
        ("jsonl", "text", ["今" * 20, text_of("a", 31)], "fewer than 32 letters and digits: 2"),
        ("jsonl", "text", [], "it is empty"),
    ],
)
def test_a_set_that_would_protect_nothing_is_refused(
    tmp_path: Path, form: str, column: str, texts: list[str], reason: str
):
    write_lines(tmp_path / "web.jsonl", [text_of(n) for n in range(5)])
    file = write_set(form, column, texts, tmp_path)
    sets = [{"name": "headlines", "path": str(file)}]
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web.jsonl"), decontamination={"sets": sets})
    message = (
        f'decontamination.sets: "headlines" would protect nothing: no text in column "text" of {file} has 32 letters '
        f"and digits ({reason})"
    )
    with pytest.raises(UserError) as caught:
        make_corpus(recipe, "local", 1)
    assert str(caught.value) == message
    assert not work_folder(tmp_path / "data").exists()
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe))
    for stage in ("clean", "pairs", "select"):
        run_task(work.folder, stage, 0, 1)
    with pytest.raises(UserError) as caught:
        run_task(work.folder, "held_out", 0, 1)
    assert str(caught.value) == f'stage "held_out", unit 1: {message}'


def test_texts_of_a_set_that_are_not_compared_are_counted(tmp_path: Path):
    write_lines(tmp_path / "web.jsonl", [text_of(n) for n in range(5)])
    lines = [json.dumps({"text": text_of(3)}), json.dumps({"text": "太短了。"}), json.dumps({"sentence": "x"}), "{"]
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    sets = [{"name": "questions", "path": str(tmp_path / "set.jsonl")}]
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web.jsonl"), decontamination={"sets": sets})
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_none=True)))
    assert "  the set questions: 1 of 4 texts compared with training documents" in m6("data", "corpus", file).stdout
    counters = load_record(tmp_path / "data").sets["questions"]
    assert (counters.documents, counters.kept) == (4, 1)
    removed = counters.removed["held_out"]
    assert removed.pop("fewer than 32 letters and digits") == removed.pop("the text is null") == 1
    assert removed.total() == 1  # the damaged line


@pytest.mark.parametrize("key", ["sets", "picture_sets"])
def test_a_finished_corpus_is_another_one_when_a_set_has_changed(tmp_path: Path, key: str):
    write_lines(tmp_path / "web.jsonl", [text_of(n) for n in range(5)])
    folder = tmp_path / "benchmark"
    write_lines(folder / "a.jsonl", [text_of("a")])
    (folder / "a.png").write_bytes(file_of(photograph(0)))
    sets = {key: [{"name": "benchmark", "path": str(folder)}]}
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web.jsonl"), decontamination=sets)
    assert not make_corpus(recipe, "local", 1).was_built
    assert make_corpus(recipe, "local", 1).was_built
    write_lines(folder / "b.jsonl", [text_of("b")])
    (folder / "b.png").write_bytes(file_of(photograph(1)))
    with pytest.raises(UserError, match="data is not empty and is not this corpus"):
        make_corpus(recipe, "local", 1)


@pytest.mark.parametrize(("key", "name"), [("sets", "rows.jsonl"), ("picture_sets", "a.png")])
def test_a_set_with_a_link_to_elsewhere_is_refused(key: str, name: str, tmp_path: Path):
    """It is not read, as nothing outside of a folder is; and what it holds would not be kept out."""
    write_lines(tmp_path / "web.jsonl", [text_of(n) for n in range(5)])
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "b.jsonl", [text_of(9)])
    (tmp_path / "set" / "b.png").write_bytes(file_of(photograph(1), "PNG"))
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "set" / name).symlink_to(tmp_path / "elsewhere")
    named = {key: [{"name": "held", "path": str(tmp_path / "set")}]}
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web.jsonl"), decontamination=named)
    with pytest.raises(UserError, match=rf"decontamination\.{key}: .*{name} is not read \(outside of the folder\)"):
        make_plan(recipe)
