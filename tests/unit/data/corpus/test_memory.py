"""What the README states of a task's memory: how much more a stage takes with more documents."""

import tracemalloc
from pathlib import Path

import pytest

from m6.data.corpus.plan import make_plan
from m6.data.corpus.stages import STAGES, run_task
from m6.data.corpus.work import prepare, work_folder
from tests.fixtures.corpus import own, recipe_of, text_of, write_lines

FEW, MANY, CHARS = 200, 800, 600
HELD_OUT = 0.1
# Bytes that a document adds, as the README states them, with its characters held out in one of ten.
NGRAMS = 8 * HELD_OUT * CHARS
STATED = {"clean": 100, "pairs": 100, "select": 250, "held_out": 4 * NGRAMS, "index": 4 * NGRAMS, "write": 800}
# What is kept whatever the number: row groups, which are small here, and samples for the report.
BLOCK, KEPT = 1 << 16, 3 << 17


def peaks(folder: Path, documents: int) -> dict[str, int]:
    folder.mkdir()
    write_lines(folder / "texts.jsonl", [text_of((documents, number), CHARS) for number in range(documents)])
    recipe = recipe_of(folder / "data", own("web", folder / "texts.jsonl"), test_share=HELD_OUT, validation_share=0)
    work = prepare(work_folder(folder / "data"), make_plan(recipe))
    found = {}
    for stage in STAGES:
        tracemalloc.start()
        run_task(work.folder, stage.name, 0, 1)
        found[stage.name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


@pytest.fixture(scope="module")
def growth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m6.data.corpus.documents._GROUP_BYTES", BLOCK)
        patch.setattr("m6.data.shards.ROW_GROUP_BYTES", BLOCK)
        peaks(folder / "warm", 20)  # imports and caches
        few, many = peaks(folder / "few", FEW), peaks(folder / "many", MANY)
    return {stage: many[stage] - few[stage] for stage in STATED}


@pytest.mark.parametrize("stage", STATED)
def test_more_documents_take_no_more_memory_than_stated(growth: dict[str, int], stage: str):
    assert growth[stage] < STATED[stage] * (MANY - FEW) + KEPT
