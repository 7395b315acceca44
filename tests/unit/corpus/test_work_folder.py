"""The work folder of a corpus: what goes with it, and when."""

import os
from pathlib import Path

import pytest

from m6.corpus.counters import Counters
from m6.corpus.launch import make_corpus
from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.work import prepare, remove, work_folder
from m6.errors import UserError
from tests.fixtures.corpus import built, own, recipe_of, text_of, write_lines


@pytest.fixture
def recipe(tmp_path: Path) -> CorpusRecipe:
    write_lines(tmp_path / "web.jsonl", [text_of(n) for n in range(5)])
    return recipe_of(tmp_path / "data", own("web", tmp_path / "web.jsonl"))


def test_the_folder_of_a_finished_corpus_stays_while_its_last_job_ends(
    recipe: CorpusRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The job has given the data folder its name, and is about to mark its unit."""
    work = prepare(work_folder(built(recipe)), make_plan(recipe))
    (work.folder / "jobs.json").write_text('{"finish": "41"}')
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text("#!/bin/sh\necho 41\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(UserError, match="jobs 41 have not ended"):
        make_corpus(recipe, "local", 1)
    assert (work.folder / "plan.json").exists()
    work.mark_done("finish", 0, Counters())  # then nobody needs to ask Slurm
    assert make_corpus(recipe, "local", 1).was_built
    assert not work.folder.exists()


def test_marks_without_a_plan_are_those_of_another_corpus(recipe: CorpusRecipe):
    work = prepare(work_folder(recipe.out), make_plan(recipe))
    work.mark_done("finish", 0, Counters())
    assert prepare(work.folder, make_plan(recipe)).is_done("finish", 0)
    (work.folder / "plan.json").unlink()
    assert not prepare(work.folder, make_plan(recipe)).is_done("finish", 0)


def test_the_logs_alone_stay(recipe: CorpusRecipe):
    work = prepare(work_folder(recipe.out), make_plan(recipe))
    work.mark_done("clean", 0, Counters())
    (work.folder / "jobs.json").write_text('{"clean": "41"}')
    (work.folder / "logs" / "clean").mkdir(parents=True)
    remove(work.folder)
    assert sorted(work.folder.rglob("*")) == [work.folder / "logs", work.folder / "logs" / "clean"]
