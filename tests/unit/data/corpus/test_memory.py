"""What the README states of a task's memory: how much more a stage takes with more documents."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from m6.data.corpus.plan import make_plan
from m6.data.corpus.recipe import CorpusRecipe
from m6.data.corpus.stages import STAGES, run_task
from m6.data.corpus.work import prepare, work_folder
from tests.fixtures.corpus import own, recipe_of, text_of, write_lines
from tests.fixtures.photographs import file_of, photograph, write_pairs

Recipes = Callable[[Path, int], CorpusRecipe]

FEW, MANY, CHARS = 200, 800, 600
HELD_OUT = 0.1
# Bytes that a document adds, as the README states them, with its characters held out in one of ten.
NGRAMS = 8 * HELD_OUT * CHARS
STATED = {"clean": 100, "pairs": 100, "select": 250, "held_out": 4 * NGRAMS, "index": 4 * NGRAMS, "write": 800}
BUCKETS = 2
OF_PICTURES = {"clean": 9_000, "pairs": 6_000 / BUCKETS, "select": 250, "held_out": 0, "index": 0, "write": 1_000}
# What is kept whatever the number: row groups, which are small here, and samples for the report.
BLOCK, KEPT = 1 << 16, 3 << 17


def texts(folder: Path, documents: int) -> CorpusRecipe:
    write_lines(folder / "texts.jsonl", [text_of((documents, number), CHARS) for number in range(documents)])
    return recipe_of(folder / "data", own("web", folder / "texts.jsonl"), test_share=HELD_OUT, validation_share=0)


def pictures(folder: Path, documents: int) -> CorpusRecipe:
    rows = [(f"{n}", f"第{n}张图片", file_of(photograph(n + 1000 * documents, 96, 72))) for n in range(documents)]
    write_pairs(folder / "web.tar", rows)
    return recipe_of(folder / "data", own("web", folder / "web.tar"), image_size=64, picture_buckets=BUCKETS)


def peaks(folder: Path, recipe_in: Recipes, documents: int) -> dict[str, int]:
    folder.mkdir()
    recipe = recipe_in(folder, documents)
    work = prepare(work_folder(folder / "data"), make_plan(recipe))
    found = {}
    for stage in STAGES:
        tracemalloc.start()
        run_task(work.folder, stage.name, 0, 1)
        found[stage.name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> dict[Recipes, dict[str, int]]:
    folder = tmp_path_factory.mktemp("memory")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m6.data.corpus.documents._GROUP_BYTES", BLOCK)
        patch.setattr("m6.data.shards.ROW_GROUP_BYTES", BLOCK)
        for kind in (texts, pictures):
            peaks(folder / f"warm {kind.__name__}", kind, 20)  # imports and caches
            few, many = (peaks(folder / f"{kind.__name__} {count}", kind, count) for count in (FEW, MANY))
            found[kind] = {stage: many[stage] - few[stage] for stage in STATED}
    return found


@pytest.mark.parametrize("stage", STATED)
@pytest.mark.parametrize(("kind", "stated"), [(texts, STATED), (pictures, OF_PICTURES)])
def test_more_documents_take_no_more_memory_than_stated(
    growth: dict[Recipes, dict[str, int]], kind: Recipes, stated: dict[str, float], stage: str
):
    assert growth[kind][stage] < stated[stage] * (MANY - FEW) + KEPT
