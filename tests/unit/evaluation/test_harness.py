"""The adapter of lm-evaluation-harness against probabilities in float64, one token after the other."""

import json
import math
from pathlib import Path

import pytest
import torch

from m6.data.manifest import Manifest
from m6.data.reader import open_split
from m6.errors import UserError
from m6.export import export_hf
from tests.fixtures.command import m6, user_error
from tests.fixtures.fabricated_run import write_run_and_data
from tests.fixtures.tiny_data import build_labelled_data

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from m6.evaluation.harness.adapter import M6LM

LIMIT = 96  # max_position_embeddings of the run
PAIRS = [
    ("今天早上小明在", "看书"),
    ("熊猫在公园里", "吃竹子。"),
    ("", "老师在北京唱歌"),
    ("下雨的时候" * 60, "打球"),
    ("我们", "画画" * 200),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    write_run_and_data(folder, initializer_range=0.2)  # so that the untrained model is not indifferent
    build_labelled_data(folder / "labelled")
    own = Manifest.load(folder / "data")
    Manifest(sources={"inews": own.sources["tiny_text"]}).save(folder / "data")
    return folder


@pytest.fixture
def lm(folder: Path) -> M6LM:
    lm = M6LM(folder / "run", batch_size=3)
    lm.model.double()
    return lm


@torch.no_grad()
def reference(lm: M6LM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The sum of log p(token | <bos>, tokens before it), and whether each is the most likely one."""
    tokens = (context + continuation)[-LIMIT:]
    total, greedy = 0.0, True
    for place in range(len(tokens) - min(len(continuation), LIMIT), len(tokens)):
        logits = lm.model(torch.tensor([[lm.prefix_token_id, *tokens[:place]]])).logits[0, -1]
        total += float(logits.log_softmax(-1)[tokens[place]])
        greedy = greedy and int(logits.argmax()) == tokens[place]
    return total, greedy


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def test_log_likelihoods(lm: M6LM):
    found = lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(PAIRS, found, strict=True):
        expected = reference(lm, lm.tok_encode(context), lm.tok_encode(continuation))
        assert score == pytest.approx(expected[0], rel=1e-10)  # fp64 on both sides; only the order of sums differs
        assert greedy == expected[1]


def test_what_greedy_decoding_writes_is_greedy(lm: M6LM):
    context = lm.tok_encode("今天早上小明在")
    tokens: list[int] = []
    for _ in range(3):
        logits = lm.model(torch.tensor([[lm.prefix_token_id, *context, *tokens]])).logits[0, -1]
        tokens.append(int(logits.argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 100]
    found = lm._loglikelihood_tokens([(("", ""), context, row) for row in (tokens, other)], disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False]


def test_rolling_windows_cover_every_token_once(lm: M6LM):
    texts = ["小明在学校", "昨天老师在山上种花，" * 30]
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]), disable_tqdm=True)
    for text, score in zip(texts, found, strict=True):
        tokens, expected, window = lm.tok_encode(text), 0.0, LIMIT - 1
        expected += reference(lm, [], tokens[:window])[0]
        for begin in range(window, len(tokens), window):
            end = min(begin + window, len(tokens))
            # The harness gives a later window as much context as it has room for, at least one token.
            expected += reference(lm, tokens[end - window - 1 : begin], tokens[begin:end])[0]
        assert score == pytest.approx(expected, rel=1e-10)
    assert len(lm.tok_encode(texts[1])) > 2 * LIMIT, "several windows"


def test_generated_texts_end_at_the_first_stop(lm: M6LM):
    (whole,) = lm.generate_until(requests("generate_until", [("小明在", {"max_gen_toks": 12})]), disable_tqdm=True)
    assert whole
    stop = whole[len(whole) // 2]
    options = {"until": ["不会出现的文字", stop], "max_gen_toks": 12}
    (cut,) = lm.generate_until(requests("generate_until", [("小明在", options)]), disable_tqdm=True)
    assert cut == whole[: whole.index(stop)]
    long = requests("generate_until", [("下雨的时候" * 60, {"max_gen_toks": 10**6, "do_sample": False})])
    assert len(lm.generate_until(long, disable_tqdm=True)) == 1


def test_a_context_cut_inside_of_a_character_fits_the_model(lm: M6LM, monkeypatch: pytest.MonkeyPatch):
    """A character that the tokenizer spells in bytes: one that is left over would be encoded as three."""
    prompts: list[str] = []

    def continued(model: object, processor: object, asked: list[str], **_: object) -> list[str]:
        prompts.extend(asked)
        return asked

    monkeypatch.setattr("m6.evaluation.harness.adapter.continue_text", continued)
    new_tokens = range(10, 14)
    asked = [("😀" * 60, {"max_gen_toks": number}) for number in new_tokens]
    lm.generate_until(requests("generate_until", asked), disable_tqdm=True)
    lengths = [len(lm.tok_encode(prompt)) for prompt in prompts]
    assert all(LIMIT - n - 6 <= length <= LIMIT - n for n, length in zip(new_tokens, lengths, strict=True)), lengths


def test_an_exported_model_has_the_same_likelihoods(lm: M6LM, folder: Path, tmp_path: Path):
    export_hf(folder / "run", tmp_path / "exported")
    exported = M6LM(tmp_path / "exported")
    exported.model.double()
    pairs = requests("loglikelihood", PAIRS[:2])
    scores = [[score for score, _ in each.loglikelihood(pairs, disable_tqdm=True)] for each in (lm, exported)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-10)


@pytest.mark.slow
def test_the_command_scores_both_tasks(lm: M6LM, folder: Path, tmp_path: Path):
    scores = {}
    for task, data in (("m6_reviews", "labelled"), ("m6_news", "data")):
        out = tmp_path / f"{task}.json"
        outcome = m6("evaluate-tasks", folder / "run", "--task", task, "--data", folder / data, "--out", out)
        assert outcome.code == 0, outcome
        assert f"| {task} | " in outcome.stdout
        scores |= json.loads(out.read_text())["scores"]
    right = []
    for row in open_split(Manifest.load(folder / "labelled"), "reviews", "test"):
        context = lm.tok_encode(f"{row['text']}这条评论是")
        found = {label: reference(lm, context, lm.tok_encode(label))[0] for label in ("好评", "差评")}
        right.append(max(found, key=found.__getitem__) == row["answer"])
    assert scores["m6_reviews"]["acc"] == pytest.approx(sum(right) / len(right))
    nats = size = 0.0
    for row in open_split(Manifest.load(folder / "data"), "inews", "test"):
        nats -= reference(lm, [], lm.tok_encode(row["text"]))[0]
        size += len(row["text"].encode())
    # The command computes in fp32.
    assert scores["m6_news"]["bits_per_byte"] == pytest.approx(nats / size / math.log(2), rel=1e-4)


def test_arguments_of_the_harness(folder: Path):
    lm = M6LM.create_from_arg_string(f"pretrained={folder / 'run'}", {"batch_size": "2", "device": "cpu"})
    assert lm.batch_size == 2
    assert lm.model.device.type == "cpu"
    for wrong, expected in (
        ({"batch_size": "auto"}, 'batch_size "auto": expected a whole number of at least 1'),
        ({"batch_size": 0}, 'batch_size "0": expected a whole number of at least 1'),
        ({"device": "tpu9"}, 'device "tpu9": PyTorch cannot use it: '),
        ({"devise": "cpu"}, 'devise: M6LM knows no such argument; did you mean "device"?'),
    ):
        with pytest.raises(UserError) as caught:
            M6LM(folder / "run", **wrong)
        assert str(caught.value).startswith(expected)


def test_a_device_is_used(folder: Path):
    """The meta device stands for one that is not the default."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("m6.evaluation.harness.adapter.load_run_model", lambda _, device: asked.append(device) or (0, 0))
        M6LM(folder / "run", device="meta")
    assert asked == [torch.device("meta")]


def test_mistakes(folder: Path, tmp_path: Path):
    def message(*options: object) -> str:
        return user_error("evaluate-tasks", folder / "run", *options)

    assert message() == 'm6_news needs --data, a folder made by "m6 data build reviews inews"'
    assert 'm6_review: no such task; did you mean "m6_reviews"?' in message("--task", "m6_review")
    assert "neither a run nor an exported model" in user_error(
        "evaluate-tasks", tmp_path, "--task", "m6_news", "--data", folder / "data"
    )
    assert "none/manifest.json does not exist" in message("--data", tmp_path / "none")
    assert 'has no source "inews"' in message("--data", folder / "labelled", "--task", "m6_news")
    assert f"--out {tmp_path}: is a folder; expected the JSON file to write" in message("--out", tmp_path)
    assert not (folder / "run" / "tasks.json").exists()


@pytest.mark.slow
def test_a_task_that_nobody_has(folder: Path):
    message = user_error("evaluate-tasks", folder / "run", "--task", "hellaswagg")
    assert message == 'hellaswagg: no such task; did you mean "hellaswag"?'


def test_a_task_whose_data_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def no_network(**_: object) -> None:
        raise ConnectionError("Couldn't reach 'hellaswag' on the Hub")

    monkeypatch.setattr("lm_eval.simple_evaluate", no_network)
    message = user_error("evaluate-tasks", folder / "run", "--task", "m6_news", "--data", folder / "data")
    assert message == "m6_news: the data cannot be read: Couldn't reach 'hellaswag' on the Hub"
