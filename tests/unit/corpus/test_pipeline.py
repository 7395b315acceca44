"""A corpus from files to shards: what is kept, what is counted, and that nothing depends on the tasks."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m6.corpus import stages
from m6.corpus.launch import check_jobs_ended, make_corpus
from m6.corpus.output import load_record
from m6.corpus.plan import Part, make_plan
from m6.corpus.reading import read_part
from m6.corpus.stages import STAGES, run_task, unfinished
from m6.corpus.work import prepare, work_folder
from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.data.verification import verify_shards
from m6.errors import UserError
from tests.fixtures.command import contents, m6, user_error
from tests.fixtures.corpus import built, own, recipe_of, removed_from, text_of, write_lines

ORIGINALS = 60
NEAR = range(0, 20)  # these have a copy with one more character
EXACT = range(20, 30)  # these have an equal copy


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of files with copies in other files, another with a test split, and a set of questions."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = [text_of(n, 150 + n) for n in range(ORIGINALS)]
    texts += [f"{texts[n][:80]}某{texts[n][80:]}" for n in NEAR]
    texts += [texts[n].replace("。", "。 ") for n in EXACT]  # blanks are not compared
    texts += [
        text_of("question", 90) + text_of("around", 200),
        "太短了。",
        text_of("mail") + "\n联系我：wang@example.cn",
    ]
    random.Random(0).shuffle(texts)
    for number in range(4):
        write_lines(folder / "web" / f"{number}.jsonl", texts[number::4])
    rows = {
        "text": [text_of(("book", n), 400) for n in range(12)] + [text_of(3, 153)],
        "part": ["train"] * 10 + ["test"] * 3,
    }
    (folder / "books").mkdir()
    pq.write_table(pa.table(rows), folder / "books" / "books.parquet")
    write_lines(folder / "questions.jsonl", [text_of("question", 90)])
    return {"folder": folder, "web": folder / "web", "books": folder / "books"}


def recipe_in(out: Path, inputs: dict[str, Path]):
    entries = [*own("web", inputs["web"]), *own("books", inputs["books"], split_column="part")]
    sets = [{"name": "questions", "path": str(inputs["folder"] / "questions.jsonl")}]
    shares = {"validation_share": 0.2, "test_share": 0.2}
    return recipe_of(out, entries, decontamination={"sets": sets}, passage_chars=100, **shares)


@pytest.fixture(scope="module")
def corpus(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(recipe_in(tmp_path_factory.mktemp("corpus") / "data", inputs))


def documents(folder: Path) -> dict[str, dict[str, str]]:
    """The text of each document by split and id."""
    manifest = Manifest.load(folder)
    found: dict[str, dict[str, str]] = {}
    for source in manifest.sources:
        for split in ("train", "validation", "test"):
            texts = found.setdefault(split, {})
            for file in manifest.files(source, split):
                for row in pq.read_table(file).to_pylist():
                    name = row["id"].rpartition("/")[0]
                    texts[name] = texts.get(name, "") + row["text"]
    return found


@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_folders_of_files_are_splits(form: str, tmp_path: Path):
    for split in ("train", "test"):
        write_lines(tmp_path / "web" / split / f"0.{form}", [text_of(split)])
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web"))
    plan = make_plan(recipe)
    assert plan.inputs["web"].own_splits == ["test", "train"]
    rows = [row for part in plan.parts for row in read_part(recipe, plan, part, tmp_path / "fetched")]
    assert {(row.id.rpartition("/")[0].partition(":")[0], row.split) for row in rows} == {
        (f"web/train/0.{form}", "train"),
        (f"web/test/0.{form}", "test"),
    }
    (tmp_path / "web" / "train").rename(tmp_path / "web" / "validation")
    assert make_plan(recipe).inputs["web"].origin != plan.inputs["web"].origin


@pytest.mark.parametrize("form", ["jsonl", "txt"])
def test_a_folder_beside_one_that_is_no_split_is_none_either(form: str, tmp_path: Path):
    """Also for a part that reads of one folder alone."""
    for folder in ("dev", "soup"):
        write_lines(tmp_path / "web" / folder / f"0.{form}", [text_of(folder)])
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web"))
    plan = make_plan(recipe)
    assert plan.inputs["web"].own_splits == []
    parts = [Part(input="web", files=[number]) for number in range(len(plan.files))]
    rows = [row for part in parts for row in read_part(recipe, plan, part, tmp_path / "fetched")]
    assert [row.split for row in rows] == [None, None]


def test_words_in_the_names_of_all_files_are_splits(tmp_path: Path):
    for split in ("train", "test"):
        write_lines(tmp_path / "web" / f"data_{split}.jsonl", [text_of(split)])
    recipe = recipe_of(tmp_path / "data", own("web", tmp_path / "web"))
    plan = make_plan(recipe)
    assert plan.inputs["web"].own_splits == ["test", "train"]
    rows = [row for part in plan.parts for row in read_part(recipe, plan, part, tmp_path / "fetched")]
    assert {(row.id.partition(":")[0], row.split) for row in rows} == {
        ("web/data_train.jsonl", "train"),
        ("web/data_test.jsonl", "test"),
    }


def test_a_whole_source_is_read_as_it_was_planned(tmp_path: Path):
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"picture")
    (folder / "a.txt").write_text("一只猫")
    recipe = recipe_of(tmp_path / "data", own("photos", folder))
    plan = make_plan(recipe)
    [part] = plan.parts
    assert [row.text for row in read_part(recipe, plan, part, tmp_path / "fetched")] == ["一只猫"]
    (folder / "a.txt").write_text("一条狗")
    with pytest.raises(UserError, match="photos has changed since the corpus was begun"):
        list(read_part(recipe, plan, part, tmp_path / "fetched"))


def test_every_document_is_kept_or_counted(corpus: Path):
    record = load_record(corpus)
    web, books = record.inputs["web"], record.inputs["books"]
    assert web.documents == ORIGINALS + len(NEAR) + len(EXACT) + 3
    assert books.documents == 13
    for counters in record.inputs.values():
        assert counters.documents == counters.kept + removed_from(counters)
    # Original 3 and its near copy are both copies of the book's test document, whose split decides.
    assert web.removed["duplicates"] == {"near duplicate": len(NEAR), "exact duplicate": len(EXACT) + 1}
    assert web.removed["filter"] == {"too short": 1}
    assert web.removed["decontamination"] == {"shares text with the set questions": 1}
    assert books.removed == {}
    assert web.changed["e-mail addresses"] == 1
    kept = documents(corpus)
    assert sum(map(len, kept.values())) == web.kept + books.kept
    assert "wang@example.cn" not in "".join(text for texts in kept.values() for text in texts.values())


def test_of_copies_the_longest_is_kept_and_a_test_document_first(corpus: Path):
    kept = documents(corpus)
    everything = {text.replace("\n", "").replace(" ", "") for texts in kept.values() for text in texts.values()}
    for number in range(ORIGINALS):
        text = text_of(number, 150 + number)
        longer = f"{text[:80]}某{text[80:]}"
        expected = longer if number in NEAR and number != 3 else text
        found = [each for each in everything if text[:60].replace("\n", "") in each]
        assert found == [expected.replace("\n", "")], number
    assert any(name.startswith("books/") and text_of(3, 153)[:50] in text for name, text in kept["test"].items())


def test_it_is_a_data_folder_like_any_other(corpus: Path):
    manifest = Manifest.load(corpus)
    for name, entry in manifest.sources.items():
        for split, part in entry.splits.items():
            verify_shards(corpus, part.shards)
            if part.rows:
                rows = open_split(manifest, name, split)
                assert max(map(len, rows.column("text"))) <= 100
                assert set(rows.column("source")) == {name}
            if split != "train" and part.rows:
                assert part.shared is not None
                assert part.shared.rows == 0
    assert manifest.sources["books"].own_splits == ["train", "validation", "test"]
    assert not work_folder(corpus).joinpath("done").exists()


@pytest.mark.parametrize("num_tasks", [3, 8])
def test_any_number_of_tasks_gives_the_same_bytes(
    inputs: dict[str, Path], corpus: Path, tmp_path: Path, num_tasks: int
):
    recipe = recipe_in(tmp_path / "data", inputs)
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe))
    for stage in STAGES:
        for task in reversed(range(num_tasks)):
            run_task(work.folder, stage.name, task, num_tasks)
    assert contents(tmp_path / "data") == contents(corpus)


def test_a_killed_task_loses_only_its_own_unit(inputs: dict[str, Path], corpus: Path, tmp_path: Path):
    """SIGKILL while part 2 writes its signatures, and again while it writes its shards."""
    recipe = recipe_in(tmp_path / "data", inputs)
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe))
    for module, function in (("stages", "write_signatures"), ("output", "_rows")):
        code = (
            f"import os, signal, sys; from pathlib import Path; import m6.corpus.{module} as module\n"
            f"from m6.corpus.stages import STAGES, run_task\n"
            f"before = module.{function}\n"
            f"def dies(*arguments):\n"
            f"    if len(list(Path(sys.argv[1]).glob('done/{'clean' if module == 'stages' else 'write'}/*'))) == 2:\n"
            f"        os.kill(os.getpid(), signal.SIGKILL)\n"
            f"    return before(*arguments)\n"
            f"module.{function} = dies\n"
            f"for stage in STAGES: run_task(Path(sys.argv[1]), stage.name, 0, 1)\n"
        )
        ended = subprocess.run([sys.executable, "-c", code, str(work.folder)], capture_output=True, text=True)
        assert ended.returncode == -9, ended.stderr
    assert [stage.name for stage in unfinished(work)] == ["write", "finish"]
    first = {file: file.stat().st_mtime_ns for file in sorted(work.folder.glob("done/write/*"))}
    assert len(first) == 2
    for stage in STAGES[:-1]:
        run_task(work.folder, stage.name, 0, 1)
    assert first.items() <= {file: file.stat().st_mtime_ns for file in work.folder.glob("done/write/*")}.items()
    run_task(work.folder, "finish", 0, 1)
    assert contents(tmp_path / "data") == contents(corpus)


def test_the_last_stage_looks_for_whole_shards_and_reads_none(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Reading terabytes again in one process would take hours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe_in(tmp_path / "data", inputs)))
    for stage in STAGES[:-1]:
        run_task(work.folder, stage.name, 0, 1)
    shard = min((work.folder / "data" / "train").glob("web-*.parquet"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=rf"{shard} has {len(whole) - 1} bytes, expected {len(whole)}: it is damaged"):
        run_task(work.folder, "finish", 0, 1)
    shard.write_bytes(whole)
    run_task(work.folder, "finish", 0, 1)
    assert not (tmp_path / "cache" / "m6-recipes" / "verified").exists()


def test_a_stage_does_not_start_before_the_one_before_is_complete(inputs: dict[str, Path], tmp_path: Path):
    recipe = recipe_in(tmp_path / "data", inputs)
    work = prepare(work_folder(tmp_path / "data"), make_plan(recipe))
    run_task(work.folder, "clean", 0, 2)
    message = r'stage "pairs" cannot start: of "clean", unit 1, 3 is not complete'
    with pytest.raises(UserError, match=message):
        run_task(work.folder, "pairs", 0, 1)


def test_a_failed_unit_is_named(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(work: object, unit: int) -> None:
        raise OSError(28, "No space left on device")

    broken = [stages.Stage(each.name, each.units, fails if each.name == "pairs" else each.run) for each in STAGES]
    monkeypatch.setattr(stages, "STAGES", tuple(broken))
    recipe = recipe_in(tmp_path / "data", inputs)
    with pytest.raises(OSError, match="No space"):
        make_corpus(recipe, "local", 1)
    assert 'stage "pairs", unit 0 of' in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("squeue", "message"),
    [
        ("echo 41", "jobs 41 have not ended; wait for them, or cancel them"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", r"jobs 41 have ended \(Unable to contact"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", None),
    ],
)
def test_processes_and_jobs_do_not_write_one_corpus_at_a_time(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squeue: str, message: str | None
):
    recipe = recipe_in(tmp_path / "data", inputs)
    folder = work_folder(tmp_path / "data")
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text('{"clean": "41"}')
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if message is None:
        check_jobs_ended(folder)
    else:
        with pytest.raises(UserError, match=message):
            make_corpus(recipe, "local", 1)


def test_other_inputs_or_another_recipe_are_refused(tmp_path: Path):
    write_lines(tmp_path / "web" / "a.jsonl", [text_of(n) for n in range(5)])
    out = tmp_path / "data"
    first = recipe_of(out, own("web", tmp_path / "web"))
    prepare(work_folder(out), make_plan(first))
    prepare(work_folder(out), make_plan(first))  # continues
    with pytest.raises(UserError, match="another recipe: its passage_chars differs; remove it to begin anew"):
        prepare(work_folder(out), make_plan(recipe_of(out, own("web", tmp_path / "web"), passage_chars=64)))
    write_lines(tmp_path / "web" / "b.jsonl", [text_of("b")])
    with pytest.raises(UserError, match=r"other inputs: .*b\.jsonl is new"):
        prepare(work_folder(out), make_plan(first))
    (tmp_path / "web" / "b.jsonl").unlink()
    write_lines(tmp_path / "web" / "a.jsonl", [text_of(n) for n in range(1, 6)])
    with pytest.raises(UserError, match=r"other inputs: .*a\.jsonl has changed"):
        prepare(work_folder(out), make_plan(first))


def test_the_command_builds_once_and_refuses_a_folder_of_others(tmp_path: Path):
    write_lines(tmp_path / "web.jsonl", [text_of(n) for n in range(30)])
    recipe = {
        "out": str(tmp_path / "data"),
        "inputs": [{"source": str(tmp_path / "web.jsonl"), "name": "web", "licence": "MIT"}],
    }
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe))
    outcome = m6("data", "corpus", file)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout.splitlines()[0] == f"{tmp_path / 'data'} is built"
    assert "web: 30 documents read, 30 kept in" in outcome.stdout
    before = contents(tmp_path / "data")
    assert f"{tmp_path / 'data'} holds this corpus already" in m6("data", "corpus", file).stdout
    assert contents(tmp_path / "data") == before
    message = user_error("data", "corpus", file, "--set", "passage_chars=64")
    assert message == f"{tmp_path / 'data'} is not empty and is not this corpus; choose another folder or remove it"


@pytest.mark.slow
def test_processes_share_the_work_and_end_with_their_parent(inputs: dict[str, Path], corpus: Path, tmp_path: Path):
    recipe = recipe_in(tmp_path / "data", inputs)
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(recipe.model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "m6", "data", "corpus", str(file), "--tasks", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.wait(200) == 0, process.stderr.read()
    assert contents(tmp_path / "data") == contents(corpus)
    assert not os.path.exists(tmp_path / "data.lock")
