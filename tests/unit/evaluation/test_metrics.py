"""Metrics and baselines of downstream tasks, against values worked out by hand and slow references."""

import itertools

import numpy as np
import pytest

from m6.data.objectives import Example
from m6.evaluation.metrics import (
    RANKS,
    Estimate,
    LabelledTexts,
    bleu,
    bootstrap,
    chance,
    chrf,
    found_at,
    line_length,
    macro_f1,
    match_by_neighbour,
    most_frequent,
    nats_by_ngrams,
    nearest_pictures,
    predict_by_word_counts,
    share,
)
from m6.tokenizers import load_text_tokenizer
from tests.fixtures.tiny_data import build_tiny_tokenizer, draw_shape


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_text_tokenizer(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_captions_equal_to_the_references_score_100():
    texts = ["一个红色的圆形。", "蓝色的长方形在左边"]
    assert chrf(texts, texts) == pytest.approx(100)
    assert bleu(texts, texts) == pytest.approx(100)


def test_bleu_takes_characters_as_words():
    # Of 6 characters 5 match; bigrams 4/5, trigrams 3/4, 4-grams 2/3: no brevity penalty at equal lengths.
    pair = ["红色的小圆形"], ["蓝色的小圆形"]
    assert bleu(*pair) == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert 0 < chrf(*pair) < 100


def test_the_commonest():
    assert most_frequent(["甲", "乙", "乙", "丙"]) == "乙"
    assert most_frequent(["甲", "乙"]) == "甲"


def test_f1_by_hand():
    # 好: precision 1/2, recall 1; 差: precision 1, recall 2/3.
    labels, predicted = np.array(["好", "差", "差", "差"]), np.array(["好", "好", "差", "差"])
    f1_good, f1_bad = 2 * (1 / 2) * 1 / (1 / 2 + 1), 2 * 1 * (2 / 3) / (1 + 2 / 3)
    assert macro_f1(predicted, labels) == pytest.approx((f1_good + f1_bad) / 2)


def test_shares_have_wilsons_interval():
    """By the formula with z = 1.959964, and never beyond 0 and 1."""
    n, p, z = 50, 0.9, 1.959963984540054
    middle, half = (p + z**2 / (2 * n)), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    estimate = share([True] * 45 + [False] * 5)
    assert estimate.value == 0.9
    expected = ((middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n))
    assert (estimate.low, estimate.high) == pytest.approx(expected)
    assert share([True] * 5).high == 1.0
    assert str(estimate) == "90.0% (78.6% to 95.7%)"


def test_bootstrap_of_a_mean_is_as_wide_as_its_standard_error():
    """1.96 standard errors to each side; 300 resamples give the ends to about a tenth of their distance."""
    values = np.random.default_rng(0).normal(3, 2, size=400)
    estimate = bootstrap(400, lambda index: float(values[index].mean()))
    assert estimate.value == values.mean()
    error = values.std() / 20
    assert estimate.low == pytest.approx(values.mean() - 1.96 * error, abs=0.4 * error)
    assert estimate.high == pytest.approx(values.mean() + 1.96 * error, abs=0.4 * error)
    assert estimate == bootstrap(400, lambda index: float(values[index].mean()))  # the same in every run
    assert bootstrap(1, lambda index: 2.5) == Estimate(2.5)


def test_word_counts_learn_words_that_decide():
    rng = np.random.default_rng(0)
    filler = list("的了是在我有他这中大")

    def make(number: int) -> LabelledTexts:
        labels = [str(label) for label in rng.choice(["好评", "差评"], size=number)]
        mark = {"好评": "满意", "差评": "失望"}
        texts = ["".join(rng.choice(filler, 8)) + mark[label] + "".join(rng.choice(filler, 8)) for label in labels]
        return LabelledTexts(texts, labels)

    test = make(100)
    # 0.5 by guessing; the words decide every text, and noise misleads a few.
    training = make(200)
    for validation in (make(50), LabelledTexts([], [])):
        predicted = predict_by_word_counts(training, validation, test.texts)
        assert np.mean(np.array(predicted) == np.array(test.labels)) >= 0.95


def test_recall_against_sorting():
    rng = np.random.default_rng(1)
    scores = rng.permutation(70).reshape(7, 10).astype(float)
    relevant = rng.random((7, 10)) < 0.3
    relevant[:, 0] = True
    for k in (1, 2, 5, 10):
        found = [any(relevant[q, c] for c in np.argsort(-scores[q])[:k]) for q in range(7)]
        assert found_at(scores, relevant, k).tolist() == found


def test_constant_scores_find_nothing_that_is_not_there_anyway():
    relevant = np.eye(4, dtype=bool)
    assert not found_at(np.zeros((4, 4)), relevant, 1).any()
    assert found_at(np.zeros((4, 4)), relevant, 4).all()


def test_chance_is_the_mean_over_all_orders():
    relevant = np.array([[True, False, True, False], [False, True, False, False]])
    for k in RANKS:
        found = [
            np.mean([row[list(order[:k])].any() for order in itertools.permutations(range(4))]) for row in relevant
        ]
        assert chance(relevant, k) == pytest.approx(np.mean(found))


@pytest.mark.parametrize("at_once", [1, 5, 100])
def test_the_nearest_picture_is_that_of_its_colour_and_size(at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m6.evaluation.metrics.AT_ONCE", at_once)
    training = [draw_shape(c, s, z) for c in ("红色", "绿色", "蓝色") for s in ("圆形", "方块") for z in ("大", "小")]
    assert nearest_pictures(training[::-1], training).tolist() == list(range(len(training)))[::-1]
    assert nearest_pictures(training[:2], iter(training * 2)).tolist() == [0, 1], "the first of equal ones"
    query = draw_shape("蓝色", "三角形", "大")
    (nearest,) = nearest_pictures([query], training).tolist()
    assert training[nearest] in [draw_shape("蓝色", s, z) for s in ("圆形", "方块") for z in ("大", "小")]


def test_neighbours_prefer_the_caption_like_theirs():
    scores = match_by_neighbour(["红色的圆形"], ["红色的方块", "红色的圆形", "天上的云"])
    assert scores[0].argsort().tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("床前明月光，疑是地上霜。举头望明月，低头思故乡。", 5),
        ("《静夜思》李白\n床前明月光，疑是地上霜。", 5),
        ("春眠不觉晓，处处闻啼鸟啼。", None),
        ("", None),
    ],
)
def test_lines_of_verse_have_one_length(text, length):
    assert line_length(text) == length


def test_ngrams_read_the_first_half_and_are_asked_for_the_rest(tokenizer):
    """After 7 the training texts have 8 alone; where the text begins, 7 and 9 are equally frequent."""
    training = [[7, 8, 8, 8], [9, 9, 9, 9]] * 20
    easy, hard = Example(source_ids=[7, 8], target_ids=[8, 8]), Example(source_ids=[7, 8], target_ids=[9, 9])
    nats = nats_by_ngrams(training, [easy, hard], tokenizer, len(tokenizer))
    five, one = nats["5-gram model of the training texts"], nats["unigram model of the training texts"]
    assert five[0] < 0.2 < 5 < five[1]
    # 8 is 60 of 200 tokens, <eos> 40; absolute discounting takes a little of each.
    assert one[0] == pytest.approx(-2 * np.log(60 / 200) - np.log(40 / 200), abs=0.1)
