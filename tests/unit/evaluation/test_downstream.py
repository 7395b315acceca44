"""The model as a judge, against one forward pass for each target; the whole report; rows that training holds."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from m6.checkpoints.loading import load_run_model
from m6.config.run import load_config
from m6.data.manifest import Manifest
from m6.data.objectives import MATCH, NO_MATCH, OBJECTIVES, Example, ObjectivesSettings, Sample, make_example
from m6.errors import UserError
from m6.evaluation.downstream import TASKS, Subject, held_out
from m6.evaluation.metrics import match_by_model, predict_by_likelihood
from m6.generation.captioning import write_targets
from m6.generation.likelihood import target_log_likelihoods
from m6.runs.data import keep_sources, open_data
from m6.runs.directory import SOURCES
from m6.tokenizers.pictures import decode_picture
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import run_document, write_run
from tests.fixtures.likelihoods import by_hand
from tests.fixtures.tiny_data import IMAGE_SIDE, build_labelled_data, build_tiny_data, build_tiny_tokenizer, draw_shape

TEXTS = ["红色", "今天早上，小明在公园里看书。", "蓝色的方块和绿色的圆形"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("downstream")
    build_tiny_data(folder / "data")
    build_labelled_data(folder / "labelled")
    build_tiny_tokenizer(folder / "tokenizer")
    return folder


def run_of(folder: Path, data: str, *tasks: str) -> Path:
    document = run_document(folder / data, folder / "tokenizer", initializer_range=0.5)
    document["m6"]["objectives"] = {name: {"weight": float(name in tasks)} for name in OBJECTIVES}
    run = folder / "_".join([data, *tasks])
    if not run.exists():
        write_run(run, document)
    return run


@pytest.fixture(scope="module")
def judge(folder: Path):
    model, processor = load_run_model(run_of(folder, "data", "image_text_matching"), torch.device("cpu"))
    return model.double(), processor


def test_likelihoods_of_a_batch_are_those_of_single_rows(judge):
    model, processor = judge
    picture = decode_picture(draw_shape("红色", "圆形", "大"), IMAGE_SIDE)
    cases = [(text, target, shown) for text in TEXTS for target in ("好", "红色圆形") for shown in (None, picture)]
    encode = processor.tokenizer.encode_ids
    examples = [Example(source_ids=encode(text), target_ids=encode(target)) for text, target, _ in cases]
    scores = target_log_likelihoods(model, processor, examples, [shown for *_, shown in cases], batch_size=5)
    expected = [by_hand(model, processor, *case) for case in cases]
    # The losses are fp32.
    assert scores.numpy() == pytest.approx(np.array(expected), rel=1e-5)


def test_the_label_of_the_greatest_likelihood(judge):
    model, processor = judge
    labels = ["好评", "差评", "圆形"]
    expected = [max(labels, key=lambda label: by_hand(model, processor, text, label)) for text in TEXTS]
    assert predict_by_likelihood(model, processor, TEXTS, labels, max_tokens=40) == expected


def test_matches_are_likelihood_ratios(judge):
    model, processor = judge
    pictures = [decode_picture(draw_shape(c, "圆形", "大"), IMAGE_SIDE) for c in ("红色", "蓝色")]
    sizes = []
    run = model.register_forward_hook(lambda _, __, output: sizes.append(len(output.target_losses)))
    scores = match_by_model(model, processor, pictures, TEXTS, max_tokens=40)
    run.remove()
    assert len(sizes) == 2, "a picture at a time"
    for row, picture in enumerate(pictures):
        for column, text in enumerate(TEXTS):
            yes, no = (by_hand(model, processor, text, answer, picture) for answer in (MATCH, NO_MATCH))
            assert scores[row, column] == pytest.approx(yes - no, rel=1e-4, abs=1e-4)


def test_tables_of_pictures(folder: Path):
    run = run_of(folder, "data", "image_captioning", "image_text_matching")
    outcome = m6("downstream", run, "--max-rows", 6)
    assert outcome.code == 0, outcome.stderr
    text = (run / "downstream.md").read_text(encoding="utf-8")
    assert outcome.stdout == text + "\n"
    assert "## Captioning: tiny_shapes, 1 test pictures" in text
    assert "## Matching: tiny_shapes, 1 test pictures" in text
    assert text.count("5 of 6 test rows are left out: training holds their picture") == 2
    rows = Manifest.load(folder / "data").split("tiny_shapes", "test").rows
    assert text.count(f"Read were 6 of {rows:,} test rows (--max-rows).") == 2
    for record in json.loads((run / "downstream.json").read_text(encoding="utf-8")):
        assert (record["rows"], record["rows_read"], record["test_rows"]) == (1, 6, rows)
    assert "caption of the nearest training picture" in text


def test_captions_are_compared_as_a_model_can_write_them(folder: Path, judge, monkeypatch):
    config = load_config(run_of(folder, "data", "image_captioning") / "config.json")
    subject = Subject(None, judge[1], config, Manifest.load(folder / "data"), 6)
    rows = [{"text": "第１２号  圆形 ", "image": draw_shape("红色", "圆形", "大")}]
    monkeypatch.setattr("m6.evaluation.downstream.caption", lambda *_, **__: ["第12号 圆形"])
    scores = TASKS["image_captioning"].score(subject, "tiny_shapes", rows, rows)
    assert {system: own["equal to the reference"].value for system, own in scores.items()} == dict.fromkeys(scores, 1.0)


def test_a_picture_may_have_several_captions_and_a_caption_several_pictures(folder: Path, judge, monkeypatch):
    config = load_config(run_of(folder, "data", "image_text_matching") / "config.json")
    subject = Subject(judge[0], judge[1], config, Manifest.load(folder / "data"), 6)
    red, blue = (draw_shape(colour, "圆形", "大") for colour in ("红色", "蓝色"))
    captions = {red: ["红", "圆"], blue: ["圆", "蓝"]}
    rows = [{"text": text, "image": image} for image, texts in captions.items() for text in texts]
    right = np.array([[text in texts for text in ("圆", "红", "蓝")] for texts in captions.values()], float)
    monkeypatch.setattr("m6.evaluation.metrics.match_by_model", lambda *_: right)
    scores = TASKS["image_text_matching"].score(subject, "tiny_shapes", rows, rows)["this model"]
    assert {name: each.value for name, each in scores.items()} == dict.fromkeys(scores, 1.0)


def test_long_captions_have_room(folder: Path, judge, monkeypatch):
    config = load_config(run_of(folder, "data", "image_captioning") / "config.json")
    subject = Subject(None, judge[1], config, Manifest.load(folder / "data"), 6)
    room = []
    for text in ("圆形", "圆形" * 60):
        rows = [{"text": text, "image": draw_shape("红色", "圆形", "大")}]
        monkeypatch.setattr(
            "m6.evaluation.downstream.caption",
            lambda *_, **options: room.append(options["max_new_tokens"]) or [""],
        )
        TASKS["image_captioning"].score(subject, "tiny_shapes", rows, rows)
    most = subject.max_tokens("image_captioning") + 1
    assert room == [min(49, most), min(most, 1 + len(judge[1].tokenizer.encode_ids("圆形" * 60)))]
    assert room[0] < room[1]


def test_what_a_run_has_learned_from_other_data_is_said(folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(run_of(folder, "data", "visual_question_answering"), run)
    keep_sources(run, open_data(load_config(run / "config.json")))
    said = "The run learned from other data: what of it is in these rows was not counted."
    assert said not in m6("downstream", run, "--max-rows", 6).stdout
    text = (run / SOURCES).read_text()
    (shard,) = Manifest.load(folder / "data").split("tiny_vqa", "train").shards
    assert shard.sha256 in text
    (run / SOURCES).write_text(text.replace(shard.sha256, "0" * 64))
    assert said in m6("downstream", run, "--max-rows", 6).stdout


def test_without_test_rows_there_is_nothing_to_score(folder: Path, tmp_path: Path):
    own = Manifest.load(folder / "data").sources["tiny_vqa"]
    shutil.copytree(folder / "data", tmp_path / "data")
    splits = {name: entry for name, entry in own.splits.items() if name != "test"}
    Manifest(sources={"tiny_vqa": own.model_copy(update={"splits": splits})}).save(tmp_path / "data")
    document = run_document(tmp_path / "data", folder / "tokenizer")
    weights = {name: float(name == "visual_question_answering") for name in OBJECTIVES}
    document["m6"]["objectives"] = {name: {"weight": weight} for name, weight in weights.items()}
    write_run(tmp_path / "run", document)
    expected = f'{tmp_path / "data"}: split "test" has no rows of the sources that visual_question_answering read'
    assert user_error("downstream", tmp_path / "run").startswith(expected)
    assert not (tmp_path / "run" / "downstream.md").exists()


def test_answers_are_judged_with_the_picture(judge):
    model, processor = judge
    pictures = [decode_picture(draw_shape(c, "圆形", "大"), IMAGE_SIDE) for c in ("红色", "蓝色", "绿色")]
    answers = ["红色", "蓝色", "是"]
    expected = [
        max(answers, key=lambda answer: by_hand(model, processor, text, answer, picture))
        for text, picture in zip(TEXTS, pictures, strict=True)
    ]
    assert predict_by_likelihood(model, processor, TEXTS, answers, max_tokens=40, pictures=pictures) == expected


def test_table_of_questions(folder: Path):
    run = run_of(folder, "data", "visual_question_answering")
    outcome = m6("downstream", run, "--max-rows", 6)
    assert outcome.code == 0, outcome.stderr
    text = (run / "downstream.md").read_text(encoding="utf-8")
    assert "## Questions: tiny_vqa, " in text
    assert "| commonest answer to the question |" in text


def test_a_context_follows_the_text_as_in_training(judge):
    model, processor = judge
    settings = ObjectivesSettings.model_validate({"text_classification": {"with_context": True}})
    rng, labels = np.random.default_rng(0), ["好评", "差评", "圆形"]
    for room in (6, 9, 40):  # the context is left out, cut, and whole
        sample = Sample(id="0", text=TEXTS[0], context=TEXTS[1], answer="好评")
        made = make_example("text_classification", sample, rng, processor.tokenizer, settings, room)
        examples = [dataclasses.replace(made, target_ids=processor.tokenizer.encode_ids(label)) for label in labels]
        scores = target_log_likelihoods(model, processor, examples, [None] * 3)
        own = predict_by_likelihood(model, processor, [TEXTS[0]], labels, room, contexts=[TEXTS[1]])
        assert own == [labels[int(scores.argmax())]]


def test_targets_are_written_greedily_after_sources_of_any_length(judge):
    model, processor = judge
    tokenizer, size = processor.tokenizer, model.config.text_vocab_size

    def by_steps(source: list[int]) -> list[int]:
        ids = [*source, tokenizer.bos_token_id]
        for _ in range(5):
            with torch.no_grad():
                scores = model(input_ids=torch.tensor([ids])).logits[0, -1]
            best = max([*range(size), tokenizer.eos_token_id], key=lambda token: float(scores[token]))
            if best == tokenizer.eos_token_id:
                break
            ids.append(best)
        return ids[len(source) + 1 :]

    sources = [tokenizer.encode_ids(text) for text in TEXTS]
    written = write_targets(model, processor, sources, max_new_tokens=5, batch_size=2, do_sample=False)
    assert written == [tokenizer.decode(by_steps(source)) for source in sources]


def test_table_of_continuations(folder: Path):
    run = run_of(folder, "data", "text_continuation")
    outcome = m6("downstream", run, "--max-rows", 6)
    assert outcome.code == 0, outcome.stderr
    assert "## Continuation: tiny_text, " in outcome.stdout
    (record,) = json.loads((run / "downstream.json").read_text(encoding="utf-8"))
    scores = {system: own["nats per character"]["value"] for system, own in record["scores"].items()}
    assert scores.keys() == {
        "this model",
        "5-gram model of the training texts",
        "unigram model of the training texts",
    }
    # The tiny texts are put together of few parts, which 60 of them show; the model is random.
    assert scores["5-gram model of the training texts"] < scores["unigram model of the training texts"]
    assert scores["5-gram model of the training texts"] < scores["this model"]


def test_verse_of_which_a_model_reads_only_the_heading_is_not_counted(folder: Path, judge, monkeypatch):
    """Its form is unknown: a regular continuation would count as an error, and a broken one as kept."""
    config = load_config(run_of(folder, "data", "text_continuation") / "config.json")
    subject = Subject(None, judge[1], config, Manifest.load(folder / "data"), 6)
    lines = "今天早上，小明看书。"
    texts = [f"《小明在公园里看书》老师\n{lines}", f"{lines}{lines}", f"《小明》老师\n{lines}{lines}{lines}"]
    rows = [{"id": str(number), "text": text} for number, text in enumerate(texts)]
    sources = []

    def write(model, processor, asked, **_):
        sources.extend(str(processor.tokenizer.decode(ids)) for ids in asked)
        return [lines, "今天，小明看书。"]

    monkeypatch.setattr("m6.evaluation.downstream.write_targets", write)
    monkeypatch.setattr(
        "m6.evaluation.metrics.nats_by_model", lambda model, processor, examples: np.ones(len(examples))
    )
    scores = TASKS["text_continuation"].score(subject, "own", rows, rows)
    assert sources == [lines, f"《小明》老师\n{lines}"]
    assert scores["this model"]["verse that keeps its form"].value == 0.5


def test_table_of_labels(folder: Path):
    run = run_of(folder, "labelled", "text_classification")
    outcome = m6("downstream", run, "--out", run / "labels.md")
    assert outcome.code == 0, outcome.stderr
    lines = (run / "labels.md").read_text(encoding="utf-8").splitlines()
    assert "## Classification: reviews, 4 test texts" in lines
    assert not any("--max-rows" in line for line in lines)
    for begin in (
        "| commonest training label | 50.0% (15.0% to 85.0%) | 0.33 (",
        "| TF-IDF and logistic regression | 100.0% (51.0% to 100.0%) | 1.00 (",
    ):
        assert any(line.startswith(begin) for line in lines), lines


@pytest.mark.parametrize(
    ("data", "task", "message"),
    [
        ("labelled", "text_classification", 'own: all training rows have the label "好评"'),
        ("data", "text_continuation", "own: none of 2 test texts has two sentences"),
    ],
)
def test_rows_from_which_nothing_is_learned_are_refused_before_the_model_runs(
    folder: Path, judge, monkeypatch, data, task, message
):
    config = load_config(run_of(folder, data, task) / "config.json")
    subject = Subject(None, judge[1], config, Manifest.load(folder / data), 6)
    rows = [{"id": str(number), "text": "一句话", "answer": "好评"} for number in range(2)]
    monkeypatch.setattr(Subject, "rows", lambda *_: rows)
    with pytest.raises(UserError, match=message):
        TASKS[task].score(subject, "own", rows, rows)


def test_a_report_needs_a_name_that_its_numbers_do_not_get(folder: Path, tmp_path: Path):
    run = run_of(folder, "data", "text_continuation")
    message = user_error("downstream", run, "--out", tmp_path / "scores.json")
    assert f"scores.json: the numbers get this name; expected a Markdown file, such as {tmp_path}/scores.md" in message
    assert "is a folder; expected the Markdown file" in user_error("downstream", run, "--out", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_task_is_refused(folder: Path):
    assert "none of its objectives is a downstream task" in user_error(
        "downstream", run_of(folder, "data", "text_denoising")
    )


def row(group: str, text: str = "", image: bytes | None = None) -> dict:
    return {"group": group, "text": text, "image": image, "answer": None}


def test_rows_that_training_holds_are_left_out():
    red, blue = draw_shape("红色", "圆形", "大"), draw_shape("蓝色", "圆形", "大")
    again = io.BytesIO()
    Image.open(io.BytesIO(red)).save(again, "BMP")
    training = [row("a", "红", red), row("b", "天 气"), row("c", "鱼")]
    new = [row("d", "红", blue), row("e", "白")]
    known = [row("f", "绿", red), row("g", "绿", again.getvalue()), row("h", "天  气"), row("c", "鸟")]
    tested = held_out([known[0], new[0], *known[1:], new[1]], training)
    assert tested.rows == new
    assert tested.remark.startswith("4 of 6 test rows are left out")
    assert held_out(new, training).remark == ""


def test_where_training_holds_everything_the_report_says_so():
    tested = held_out([row("a", "红")], [row("a", "蓝")])
    assert len(tested.rows) == 1
    assert "measure memory" in tested.remark
