"""``m6 classify`` on own texts and pictures, against one forward pass for each label."""

import json
from pathlib import Path

import pytest
import torch

from m6.checkpoints.loading import load_run_model
from m6.data.objectives import OBJECTIVES
from m6.tokenizers.pictures import decode_picture
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import run_document, write_run
from tests.fixtures.likelihoods import by_hand
from tests.fixtures.tiny_data import IMAGE_SIDE, build_tiny_data, build_tiny_tokenizer, draw_shape

TEXTS = ["红色", "今天早上，小明在公园里看书。", "蓝色的方块和绿色的圆形"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned to match pictures and captions."""
    folder = tmp_path_factory.mktemp("classify")
    data, tokenizer = build_tiny_data(folder / "data"), build_tiny_tokenizer(folder / "tokenizer")
    document = run_document(data, tokenizer, initializer_range=0.5)
    document["m6"]["objectives"] = {name: {"weight": float(name == "image_text_matching")} for name in OBJECTIVES}
    write_run(folder / "run", document)
    return folder / "run"


@pytest.fixture(scope="module")
def judge(run: Path):
    model, processor = load_run_model(run, torch.device("cpu"))
    return model.double(), processor


def most_likely(scores: list[float], labels: list[str]) -> str:
    shares = torch.tensor(scores).softmax(dim=0)
    return f"{labels[int(shares.argmax())]}\t{float(shares.max()):.4f}"


def printed(run: Path, *arguments: object) -> tuple[list[str], str]:
    outcome = m6("classify", "--checkpoint", run, "--label", "好评", "--label", "差评", *arguments)
    assert outcome.code == 0, outcome.stderr
    return outcome.stdout.splitlines(), outcome.stderr


def test_own_texts_are_classified(run: Path, judge, tmp_path: Path):
    model, processor = judge
    labels, lines = ["好评", "差评"], []
    for text in TEXTS:
        lines.append(f"{text}\t{most_likely([by_hand(model, processor, text, label) for label in labels], labels)}")
    (tmp_path / "texts.txt").write_text("\n".join([*TEXTS, ""]), encoding="utf-8")
    said, warned = printed(run, "--texts", tmp_path / "texts.txt")
    assert said == lines
    assert "does not say that it has learned m6.objectives.text_classification; its labels may mean nothing" in warned
    assert printed(run, TEXTS[0])[0] == lines[:1]
    assert "1 of 2 texts are longer than" in printed(run, "--texts", long_and_short(tmp_path))[1]


def test_a_context_follows_its_text(run: Path, judge, tmp_path: Path):
    model, processor = judge
    labels, (text, context) = ["好评", "差评"], TEXTS[:2]
    sep = processor.tokenizer.sep_token_id
    source = [*processor.tokenizer.encode_ids(text), sep, *processor.tokenizer.encode_ids(context)]
    line = f"{text}\t{most_likely([by_hand(model, processor, source, label) for label in labels], labels)}"
    (tmp_path / "texts.txt").write_text(f"{text}\t{context}\n", encoding="utf-8")
    assert printed(run, text, "--context", context)[0] == printed(run, "--texts", tmp_path / "texts.txt")[0] == [line]
    assert printed(run, text)[0] != [line]


def test_a_run_that_learned_with_contexts_misses_one(run: Path, tmp_path: Path):
    document = json.loads((run / "config.json").read_text())
    document["m6"]["objectives"]["text_classification"]["with_context"] = True
    write_run(tmp_path / "run", document)
    warning = "warning: the model learned texts with a context, and none is given"
    assert warning in printed(tmp_path / "run", TEXTS[0])[1]
    assert warning not in printed(tmp_path / "run", TEXTS[0], "--context", TEXTS[1])[1]


def long_and_short(folder: Path) -> Path:
    (folder / "long.txt").write_text("红色\n" + "今天早上" * 60 + "\n", encoding="utf-8")
    return folder / "long.txt"


def test_own_pictures_are_matched(run: Path, judge, tmp_path: Path):
    model, processor = judge
    expected, labels = [], ["好评", "差评"]
    for name in ("红色", "蓝色"):
        drawn = draw_shape(name, "圆形", "大")
        (tmp_path / f"{name}.png").write_bytes(drawn)
        picture = decode_picture(drawn, IMAGE_SIDE)
        scores = [by_hand(model, processor, "红色", label, picture) for label in labels]
        expected.append(f"{tmp_path / name}.png\t{most_likely(scores, labels)}")
    images = [part for name in ("红色", "蓝色") for part in ("--image", tmp_path / f"{name}.png")]
    assert printed(run, "红色", *images) == (expected, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--label", "好", "很好"], "--label: expected two or more different labels, found 好"),
        (["--label", "好", "--label", "好", "很好"], "--label: expected two or more different labels, found 好, 好"),
        (["--label", "好", "--label", "坏"], "give a text, with or without --image, or a file of texts with --texts"),
        (["--label", "好", "--label", "坏", "很好", "--texts", "a.txt"], "give a text, with or without --image"),
        (["--label", "好", "--label", "坏", "\udcff"], "the text '\\udcff' is not in UTF-8"),
        (["--label", "好", "--label", "坏", "很好", "--image", "a.png", "--context", "坏"], "--context follows a text"),
        (["--label", "好", "--label", "坏", "--texts", "a.txt"], "a.txt: not a readable text file"),
        (["--label", "好", "--label", "坏", "很好", "--image", "a.png"], "a.png: no such file"),
    ],
)
def test_labels_that_cannot_be_asked_for(arguments: list[str], message: str, tmp_path: Path):
    assert message in user_error("classify", "--checkpoint", tmp_path, *arguments)
