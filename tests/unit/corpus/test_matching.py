"""Captions that a model finds not to describe their pictures: removed, counted, and without harm to their copies."""

from pathlib import Path
from typing import Any

import pytest

from m6.corpus.launch import make_corpus
from m6.corpus.output import load_record
from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.stages import STAGES, run_task
from m6.corpus.work import prepare, work_folder
from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.errors import UserError
from tests.fixtures.command import contents
from tests.fixtures.corpus import ScoresByCaption, built, own, recipe_of
from tests.fixtures.photographs import file_of, photograph, write_pairs

WRONG = range(6)  # pictures with a wrong caption
COPIED = range(3)  # of these a smaller picture has the right caption


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tar files with wrong captions, one of which is trusted, and a model."""
    pictures = [(f"o{n}", f"{'不对' if n in WRONG else ''}第{n}张图片", file_of(photograph(n))) for n in range(20)]
    small = [photograph(n).resize((240, 180)) for n in COPIED]
    pictures += [(f"c{n}", f"对，第{n}张图片", file_of(picture)) for n, picture in zip(COPIED, small, strict=True)]
    write_pairs(tmp_path / "web" / "a.tar", pictures[::2])
    write_pairs(tmp_path / "web" / "b.tar", pictures[1::2])
    write_pairs(tmp_path / "shop" / "a.tar", [("s", "不对，但是可信", file_of(photograph(50)))])
    (tmp_path / "model").write_text("first checkpoint")
    return tmp_path


def recipe_in(out: Path, folder: Path, **changes: Any) -> CorpusRecipe:
    inputs = [*own("web", folder / "web"), *own("shop", folder / "shop", picture_filters={"min_match": 0})]
    return recipe_of(out, inputs, picture_filters={"min_match": 0.5}, matching_model=str(folder), **changes)


def keys(corpus: Path, source: str) -> set[str]:
    manifest = Manifest.load(corpus)
    splits = [split for split, entry in manifest.sources[source].splits.items() if entry.rows]
    return {row["id"].rpartition("/")[2] for split in splits for row in open_split(manifest, source, split)}


def test_wrong_captions_are_removed_and_their_copies_are_not(folder: Path):
    corpus = built(recipe_in(folder / "data", folder))
    # The larger picture of COPIED would win over its copy, if its caption did not say something else.
    assert keys(corpus, "web") == {f"o{n}" for n in range(20) if n not in WRONG} | {f"c{n}" for n in COPIED}
    counters = load_record(corpus).inputs["web"]
    assert counters.removed == {
        "matching": {"caption does not describe the picture": len(WRONG) - len(COPIED)},
        "duplicates": {"near duplicate": len(COPIED)},
    }
    samples = counters.samples["matching: caption does not describe the picture"]
    assert all(sample.picture and sample.kept_id is None for sample in samples)
    assert keys(corpus, "shop") == {"s"}
    assert Manifest.load(corpus).recipe["scorer"] == "first checkpoint"


def test_any_number_of_tasks_gives_the_same_bytes(folder: Path):
    one, two = folder / "one" / "data", folder / "two" / "data"
    for out, num_tasks in ((one, 1), (two, 2)):
        out.parent.mkdir()
        built(recipe_in(out, folder), num_tasks)
    assert contents(two) == contents(one)


def test_another_checkpoint_is_another_corpus(folder: Path):
    recipe = recipe_in(folder / "data", folder)
    plan = make_plan(recipe)
    plan.scorer = "first checkpoint"
    work = prepare(work_folder(recipe.out), plan, ScoresByCaption)
    run_task(work.folder, "clean", 0, 1, ScoresByCaption)
    (folder / "model").write_text("second checkpoint")
    with pytest.raises(UserError, match=r'stage "match", unit 0: matching_model .* has changed since'):
        run_task(work.folder, "match", 0, 1, ScoresByCaption)
    with pytest.raises(UserError, match="was begun with another checkpoint of its matching_model"):
        make_corpus(recipe, "local", 1, ScoresByCaption)
    (folder / "model").write_text("first checkpoint")
    built(recipe)
    (folder / "model").write_text("second checkpoint")
    with pytest.raises(UserError, match="is not empty and is not this corpus"):
        make_corpus(recipe, "local", 1, ScoresByCaption)


def test_without_a_model_nothing_is_scored(folder: Path):
    recipe = recipe_of(folder / "data", own("web", folder / "web"))
    work = prepare(work_folder(recipe.out), make_plan(recipe))
    assert {stage.name: stage.units(work) for stage in STAGES}["match"] == 0
