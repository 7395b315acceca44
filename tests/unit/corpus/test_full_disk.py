"""A corpus on a disk that is full at some write: a reason, and the same command goes on to the same bytes."""

import errno
import os
from pathlib import Path

import pytest

from m6.corpus.recipe import CorpusRecipe
from m6.errors import UserError
from tests.fixtures.command import contents
from tests.fixtures.corpus import built, own, recipe_of, text_of, write_lines
from tests.fixtures.full_disk import full_disk, growing
from tests.fixtures.photographs import file_of, photograph, write_pairs


def recipe_in(folder: Path, inputs: Path) -> CorpusRecipe:
    folder.mkdir()
    both = [*own("web", inputs / "web.jsonl"), *own("pictures", inputs / "pictures.tar")]
    return recipe_of(folder / "data", both, near_duplicates={"num_buckets": 2}, picture_buckets=1)


@pytest.mark.slow
def test_a_disk_that_is_full_at_some_write(tmp_path: Path):
    write_lines(tmp_path / "web.jsonl", [text_of(number) for number in range(12)])
    write_pairs(tmp_path / "pictures.tar", [(f"{n}", f"第{n}张图片", file_of(photograph(n))) for n in range(6)])
    whole = contents(built(recipe_in(tmp_path / "whole", tmp_path)))
    for number in growing():
        recipe = recipe_in(tmp_path / f"at_{number}", tmp_path)
        with full_disk(number) as calls:
            try:
                built(recipe)
                message = ""
            except (UserError, OSError) as error:  # the command line prints both in one line
                message = str(error)
        if len(calls) <= number:
            assert message == ""
            break
        assert os.strerror(errno.ENOSPC) in message
        assert contents(built(recipe)) == whole
    assert number > 20, "the corpus wrote something"
