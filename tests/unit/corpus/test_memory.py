"""What docs/guides/corpus.md states of a task's memory: how much more a stage takes with more documents."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.stages import STAGES, run_task
from m6.corpus.work import prepare, work_folder
from tests.fixtures.corpus import own, recipe_of, text_of, write_lines
from tests.fixtures.photographs import file_of, photograph, write_pairs

Recipes = Callable[[Path, int], CorpusRecipe]

FEW, MANY, CHARS = 200, 800, 600
HELD_OUT = 0.1
# Bytes that a document adds, as the page states them, with its characters held out in one of ten.
NGRAMS = 8 * HELD_OUT * CHARS
STATED = {
    "clean": 100,
    "pairs": 100,
    "select": 250,
    "held_out": 4 * NGRAMS,
    "index": 4 * NGRAMS,
    "write": 800,
    "finish": 300,
}
BUCKETS = 2
OF_PICTURES = {
    "clean": 9_000,
    "pairs": 6_000 / BUCKETS,
    "select": 250,
    "held_out": 0,
    "index": 0,
    "write": 1_000,
    "finish": 1_500,
}
# Of a row, each a group, in files of which one at a time is read.
FINISH_BYTES, FILES, FEW_ROWS, MANY_ROWS = 25, 20, 1000, 20_000
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
        patch.setattr("m6.corpus.work._GROUP_BYTES", BLOCK)
        patch.setattr("m6.data.shards.ROW_GROUP_BYTES", BLOCK)
        for kind in (texts, pictures):
            peaks(folder / f"warm {kind.__name__}", kind, 20)  # imports and caches
            few, many = (peaks(folder / f"{kind.__name__} {count}", kind, count) for count in (FEW, MANY))
            found[kind] = {stage: many[stage] - few[stage] for stage in STATED}
    return found


def test_the_last_stage_keeps_little_of_training_rows(tmp_path: Path):
    """Rows of many files, of which a hundredth is held out; each file's keys are replaced by those of more rows."""
    rng = np.random.default_rng(0)
    peaks = []
    for rows in (FEW_ROWS, MANY_ROWS):
        folder = tmp_path / str(rows)
        for number in range(FILES):
            write_lines(folder / "web" / f"{number}.jsonl", [text_of((rows, number, n)) for n in range(3)])
        work = prepare(work_folder(folder / "data"), make_plan(recipe_of(folder / "data", own("web", folder / "web"))))
        for stage in STAGES[:-1]:
            run_task(work.folder, stage.name, 0, 1)
        for file in (work.folder / "write").glob("*.npz"):
            counts = {"train": rows, "validation": rows // 100, "test": 0}
            np.savez(
                file,
                **{f"{split}_keys": rng.integers(1, 2**63, (3, count), np.uint64) for split, count in counts.items()},
                **{f"{split}_signatures": np.empty((0, 304), np.uint8) for split in counts},
            )
        tracemalloc.start()
        run_task(work.folder, "finish", 0, 1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < FINISH_BYTES * FILES * (MANY_ROWS - FEW_ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STATED)
@pytest.mark.parametrize(("kind", "stated"), [(texts, STATED), (pictures, OF_PICTURES)])
def test_more_documents_take_no_more_memory_than_stated(
    growth: dict[Recipes, dict[str, int]], kind: Recipes, stated: dict[str, float], stage: str
):
    assert growth[kind][stage] < stated[stage] * (MANY - FEW) + KEPT
