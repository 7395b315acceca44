"""Pictures from tar files to shards: filters, copies, captions, held-out sets, and the same bytes for any tasks."""

import io
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m6.corpus.counters import PICTURES
from m6.corpus.output import load_record
from m6.corpus.plan import make_plan
from m6.corpus.recipe import CorpusRecipe
from m6.corpus.stages import STAGES, run_task, unfinished
from m6.corpus.work import prepare, work_folder
from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.data.verification import verify_shards
from scripts.benchmarks.photographs import ALTERATIONS
from tests.fixtures.command import contents, user_error
from tests.fixtures.corpus import built, own, recipe_of, removed_from, text_of, write_lines
from tests.fixtures.photographs import file_of, photograph, write_pairs

ORIGINALS = 24
NEAR, EXACT = range(8), range(8, 12)  # these have a cropped and an equal copy
REPEATED = range(12, 18)  # these have one caption
IN_SET = 20  # a darker copy of this one is in a named set


def caption_of(number: int) -> str:
    return "同一个标题" if number in REPEATED else f"第{number}张图片的标题"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tar files, a Parquet file with a test split, texts, and a set of pictures."""
    folder, rng = tmp_path_factory.mktemp("inputs"), random.Random(0)
    crop, dark = ALTERATIONS["cropped by 10 %"], ALTERATIONS["darker, x 0.75"]
    rows = [(f"o{n}", caption_of(n), file_of(photograph(n))) for n in range(ORIGINALS)]
    rows += [(f"c{n}", f"另一个标题{n}", crop(photograph(n), rng)) for n in NEAR]
    rows += [(f"e{n}", f"又一个标题{n}", file_of(photograph(n))) for n in EXACT]
    rows += [
        ("small", "太小的图片", file_of(photograph(100, 80, 40))),
        ("narrow", "太窄的图片", file_of(photograph(101, 400, 80))),
        ("blank", "空白的图片", file_of(Image.new("RGB", (200, 200), (250, 250, 249)))),
        ("short", "短", file_of(photograph(102))),
        ("long", "长" * 300, file_of(photograph(103))),
        ("english", "a caption in English", file_of(photograph(104))),
        ("mail", "联系我们：wang@example.cn", file_of(photograph(105))),
    ]
    rng.shuffle(rows)
    for shard in range(3):
        write_pairs(folder / "web" / f"{shard}.tar", rows[shard::3])
    images = [dark(photograph(number), rng) for number in (0, 200, 201)]
    table = {"caption": ["第0张", "第200张", "第201张"], "picture": images, "part": ["test", "train", "train"]}
    (folder / "shop").mkdir()
    pq.write_table(pa.table(table), folder / "shop" / "rows.parquet")
    write_lines(folder / "news.jsonl", [text_of(number) for number in range(12)])
    (folder / "set").mkdir()
    (folder / "set" / "a.jpg").write_bytes(dark(photograph(IN_SET), rng))
    (folder / "set" / "b.png").write_bytes(b"no picture")
    return folder


def recipe_in(out: Path, folder: Path) -> CorpusRecipe:
    columns: dict[str, Any] = {"text_column": "caption", "image_column": "picture", "split_column": "part"}
    inputs = [
        *own("web", folder / "web"),
        *own("shop", folder / "shop", **columns),
        *own("news", folder / "news.jsonl"),
    ]
    return recipe_of(
        out,
        inputs,
        image_size=128,
        picture_filters={"max_caption_repeats": 2},
        picture_buckets=3,
        decontamination={"picture_sets": [{"name": "benchmark", "path": str(folder / "set")}]},
        validation_share=0.1,
        test_share=0.1,
    )


@pytest.fixture(scope="module")
def corpus(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(recipe_in(tmp_path_factory.mktemp("corpus") / "data", folder))


def rows_of(corpus: Path, source: str) -> dict[str, dict[str, Any]]:
    """The rows of a source by the last part of their id."""
    manifest = Manifest.load(corpus)
    files = [(split, file) for split in ("train", "validation", "test") for file in manifest.files(source, split)]
    rows = [row | {"split": split} for split, file in files for row in pq.read_table(file).to_pylist()]
    return {row["id"].rpartition("/")[2]: row for row in rows}


def test_every_picture_is_kept_or_counted(corpus: Path):
    counters = load_record(corpus).inputs["web"]
    assert counters.documents == ORIGINALS + len(NEAR) + len(EXACT) + 7 == counters.kept + removed_from(counters)
    assert counters.removed == {
        "filter": {
            "side too short": 1,
            "too long and narrow": 1,
            "blank picture": 1,
            "caption too short": 1,
            "caption too long": 1,
            "too little Chinese": 1,
        },
        # The original and the cropped copy of picture 0 are copies of a test picture of the shop.
        "duplicates": {"near duplicate": len(NEAR) + 1, "exact duplicate": len(EXACT)},
        "decontamination": {"shows a picture of a named set": 1},
        "captions": {"caption repeats too often": len(REPEATED) - 2},
    }
    assert counters.changed == {"e-mail addresses": 1}
    assert counters.rows == counters.kept == len(rows_of(corpus, "web"))


def test_of_copies_the_largest_is_kept_and_a_test_picture_first(corpus: Path):
    web, shop = rows_of(corpus, "web"), rows_of(corpus, "shop")
    for number in NEAR:
        assert (f"o{number}" in web) == (number != 0)
        assert f"c{number}" not in web
    for number in EXACT:
        assert (f"o{number}" in web) + (f"e{number}" in web) == 1
    assert f"o{IN_SET}" not in web
    assert len(shop) == 3
    assert [row["split"] for row in shop.values() if row["text"] == "第0张"] == ["test"]
    assert sum(row["text"] == "同一个标题" for row in web.values()) == 2
    assert web["mail"]["text"] == "联系我们：[邮箱]"
    for row in web.values():
        with Image.open(io.BytesIO(row["image"])) as image:
            assert image.size == (128, 128)


def test_it_is_a_data_folder_like_any_other(corpus: Path):
    manifest = Manifest.load(corpus)
    assert {name: entry.kind for name, entry in manifest.sources.items()} == {
        "web": "image_text",
        "shop": "image_text",
        "news": "text",
    }
    for name, entry in manifest.sources.items():
        for split, part in entry.splits.items():
            verify_shards(corpus, part.shards)
            if part.rows:
                assert len(open_split(manifest, name, split)) == part.rows
            if split != "train" and part.rows:
                assert part.shared is not None
                assert part.shared.rows == 0


def test_samples_have_pictures_and_what_was_kept_instead(corpus: Path):
    samples = load_record(corpus).inputs["web"].samples
    near = samples["duplicates: near duplicate"]
    assert all(sample.picture and sample.kept_picture and sample.kept_id for sample in near)
    assert samples["filter: blank picture"][0].picture
    assert 0 < len(samples["kept"]) <= PICTURES
    assert sum(len(sample.model_dump_json()) for found in samples.values() for sample in found) < 400_000


@pytest.mark.parametrize("num_tasks", [3, 8])
def test_any_number_of_tasks_gives_the_same_bytes(folder: Path, corpus: Path, tmp_path: Path, num_tasks: int):
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe_in(tmp_path / "data", folder)))
    for stage in STAGES:
        for task in reversed(range(num_tasks)):
            run_task(work.folder, stage.name, task, num_tasks)
    assert contents(tmp_path / "data") == contents(corpus)


def test_a_killed_task_loses_only_its_own_unit(folder: Path, corpus: Path, tmp_path: Path):
    """SIGKILL in the middle of part 1 of the pictures, and again while a bucket is compared."""
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe_in(tmp_path / "data", folder)))
    for module, function, after in (("stages", "square", 20), ("picture_copies", "shows", 1)):
        code = (
            f"import os, signal, sys; from pathlib import Path; import m6.corpus.{module} as module\n"
            f"from m6.corpus.stages import STAGES, run_task\n"
            f"before, calls = module.{function}, []\n"
            f"def dies(*arguments):\n"
            f"    calls.append(1)\n"
            f"    if len(calls) > {after}: os.kill(os.getpid(), signal.SIGKILL)\n"
            f"    return before(*arguments)\n"
            f"module.{function} = dies\n"
            f"for stage in STAGES: run_task(Path(sys.argv[1]), stage.name, 0, 1)\n"
        )
        ended = subprocess.run([sys.executable, "-c", code, str(work.folder)], capture_output=True, text=True)
        assert ended.returncode == -9, ended.stderr
        done = sorted(path.relative_to(work.folder).as_posix() for path in work.folder.glob("done/*/*"))
        assert len(done) >= 1
    assert unfinished(work)[0].name == "pairs"
    for stage in STAGES:
        run_task(work.folder, stage.name, 0, 1)
    assert contents(tmp_path / "data") == contents(corpus)


def test_texts_and_pictures_are_two_inputs(folder: Path, tmp_path: Path):
    write_pairs(tmp_path / "both" / "a.tar", [("a", "一张图片", file_of(photograph(0)))])
    write_lines(tmp_path / "both" / "a.jsonl", [text_of(0)])
    recipe = tmp_path / "recipe.json"
    recipe.write_text(recipe_of(tmp_path / "data", own("both", tmp_path / "both")).model_dump_json(exclude_none=True))
    assert "has files of texts and of pictures: name them as two inputs" in user_error("data", "corpus", recipe)


def test_a_folder_of_pictures_and_of_animations(tmp_path: Path):
    (tmp_path / "pets").mkdir()
    for number in range(12):
        (tmp_path / "pets" / f"{number}.jpg").write_bytes(file_of(photograph(number)))
        (tmp_path / "pets" / f"{number}.txt").write_text(f"第{number}只猫")
    frames = [photograph(300), photograph(301)]
    (tmp_path / "pets" / "a.gif").write_bytes(file_of(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    (tmp_path / "pets" / "a.txt").write_text("会动的猫")
    for allowed in (False, True):
        filters = {"allow_animation": allowed}
        out = tmp_path / f"data{allowed}"
        counters = load_record(built(recipe_of(out, own("pets", tmp_path / "pets", picture_filters=filters)))).inputs
        assert counters["pets"].kept == 12 + allowed
        assert counters["pets"].removed == ({} if allowed else {"filter": {"animation": 1}})
