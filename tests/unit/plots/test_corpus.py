"""The page about a corpus."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from m6.corpus.counters import Counters
from m6.plots.corpus import _funnel
from scripts.benchmarks.photographs import ALTERATIONS
from tests.fixtures.command import m6, user_error
from tests.fixtures.corpus import built, own, recipe_of, text_of, write_lines
from tests.fixtures.photographs import file_of, photograph, write_pairs


def test_the_page_shows_counts_and_examples(tmp_path: Path):
    texts = [text_of(number) for number in range(40)]
    near = f"某{texts[0]}"
    write_lines(tmp_path / "a.jsonl", [*texts, near, texts[1], "短|`<b>\n[x](y)", texts[2] + "\n电话13812345678"])
    data = built(recipe_of(tmp_path / "data", own("web", tmp_path / "a.jsonl"), validation_share=0.2, test_share=0.2))
    outcome = m6("data", "report", data)
    page = data / "report" / "report.md"
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, f"{page}\n", "")
    content = page.read_text(encoding="utf-8")
    for line in (
        "| read | 44 | 44 |",
        "| - filter: too short | 1 | 1 |",
        "| - duplicates: near duplicate | 2 | 2 |",
        "| - duplicates: exact duplicate | 1 | 1 |",
        "| kept | 40 | 40 |",
        "| telephone numbers | 1 | 1 |",
        "| filter: too short | web/a.jsonl:43/0 | 短&#124;&#96;&lt;b&gt; ⏎ &#91;x](y) |",
    ):
        assert line in content.splitlines()
    pair = next(line for line in content.splitlines() if line.startswith("| web/a.jsonl:1/0 "))
    assert texts[0][:50].replace("\n", " ⏎ ") in pair
    assert "| web/a.jsonl:41/0 | 某" in pair  # the longer one is kept
    for figure in ("lengths.png", "chinese.png"):
        with Image.open(page.parent / figure) as image:
            assert min(image.size) > 100


def test_the_reasons_of_all_stages_are_in_the_table():
    stages = ("read", "matching", "a new stage")
    counters = Counters(documents=4, kept=1, removed={stage: Counter({"because": 1}) for stage in stages})
    table = _funnel({"web": counters})
    assert all(f"| - {stage}: because | 1 |" in table for stage in stages)


def test_a_folder_without_a_record_is_refused(tmp_path: Path):
    message = user_error("data", "report", tmp_path)
    assert message == f'{tmp_path / "corpus.json"} does not exist: {tmp_path} was not made by "m6 data corpus"'


def test_pictures_have_contact_sheets(tmp_path: Path):
    crop = ALTERATIONS["cropped by 10 %"]
    rows = [(f"o{number}", f"第{number}张图片", file_of(photograph(number))) for number in range(12)]
    rows += [(f"c{number}", f"<b>第{number}张", crop(photograph(number), random.Random(0))) for number in range(3)]
    rows += [("blank", "空白图片", file_of(Image.new("RGB", (200, 200), "white")))]
    write_pairs(tmp_path / "web.tar", rows)
    data = built(recipe_of(tmp_path / "data", own("web", tmp_path / "web.tar")))
    assert m6("data", "report", data).code == 0
    content = (data / "report" / "report.md").read_text(encoding="utf-8")
    expected = {
        "kept_of_web.png": (10 * 104 - 8, 2 * 104 - 8),
        "removed_duplicates_near_duplicate.png": (3 * 200 - 8, 96),  # pairs side by side
        "removed_filter_blank_picture.png": (96, 96),
        "sides.png": None,
        "lengths.png": None,
    }
    for file, size in expected.items():
        assert f"]({file})" in content
        with Image.open(data / "report" / file) as image:
            assert size is None or image.size == size
    assert "&lt;b&gt;第1张" in content
    assert "<b>" not in content
    with Image.open(data / "report" / "removed_duplicates_near_duplicate.png") as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float64)
    removed, kept = pixels[20:76, :96], pixels[20:76, 96:192]
    assert np.corrcoef(removed.ravel(), kept.ravel())[0, 1] > 0.5
