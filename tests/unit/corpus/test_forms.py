"""Which files of an input are read, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from m6.corpus.plan import make_plan
from tests.fixtures.corpus import own, recipe_of

README_ALONE = 'note: "web" is read from .md files; 2 others are not read, such as a.jsonl.zst (1 .zst, 1 .csv)\n'


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize(
    ("names", "read", "note", "columns"),
    [
        (["a.txt", "b/c.md"], ["a.txt", "b/c.md"], "", {}),
        (["README.md", "a.jsonl.zst", "b.csv"], ["README.md"], README_ALONE, {}),
        (
            ["0.tar", "1.tar", "README.md"],
            ["0.tar", "1.tar"],
            ".tar files; 1 others are not read, such as README.md",
            {},
        ),
        (
            ["a.parquet", "b.jsonl", "x/LICENSE"],
            ["a.parquet", "b.jsonl"],
            ".jsonl and .parquet files; 1 others are",
            {},
        ),
        (["a.jsonl", *(f"log.{n}" for n in range(9))], ["a.jsonl"], "(1 .0, 1 .1, 1 .2, 1 .3, 1 .4)\n", {}),
        (["a.jsonl", "b.png"], ["a.jsonl"], "such as b.png (1 .png)", {}),
        (["a.jsonl", "b.png"], ["a.jsonl"], "", {"image_column": "image"}),
    ],
)
def test_what_is_not_read_is_counted(
    names: list[str],
    read: list[str],
    note: str,
    columns: dict[str, Any],
    is_remote: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    folder = tmp_path / "web"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    source = f"file://{folder}" if is_remote else folder
    plan = make_plan(recipe_of(tmp_path / "data", own("web", source, **columns)))
    assert [file.path.rpartition("/web/")[2] for file in plan.files] == read
    errors = capsys.readouterr().err
    assert note in errors if note else not errors
