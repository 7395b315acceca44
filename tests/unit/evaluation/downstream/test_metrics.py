"""Metrics and baselines of downstream tasks, against values worked out by hand and slow references."""

import itertools

import numpy as np
import pytest

from m6.evaluation.downstream.captions import most_frequent, score_captions
from m6.evaluation.downstream.classification import (
    LabelledTexts,
    predict_by_word_counts,
    score_labels,
)
from m6.evaluation.downstream.matching import RANKS, chance, match_by_neighbour, recall_at, score_matches
from m6.evaluation.downstream.neighbours import nearest_pictures
from tests.fixtures.tiny_data import draw_shape


def test_captions_equal_to_the_references_score_100():
    texts = ["一个红色的圆形。", "蓝色的长方形在左边"]
    scores = score_captions(texts, texts)
    assert (scores.chrf, scores.exact) == (pytest.approx(100), 1.0)
    assert scores.bleu == pytest.approx(100)


def test_bleu_takes_characters_as_words():
    # Of 6 characters 5 match; bigrams 4/5, trigrams 3/4, 4-grams 2/3: no brevity penalty at equal lengths.
    scores = score_captions(["红色的小圆形"], ["蓝色的小圆形"])
    assert scores.bleu == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)
    assert scores.exact == 0
    assert 0 < scores.chrf < 100


def test_the_commonest():
    assert most_frequent(["甲", "乙", "乙", "丙"]) == "乙"
    assert most_frequent(["甲", "乙"]) == "甲"


def test_accuracy_and_f1_by_hand():
    # 好: precision 1/2, recall 1; 差: precision 1, recall 2/3.
    labels, predicted = ["好", "差", "差", "差"], ["好", "好", "差", "差"]
    scores = score_labels(predicted, labels)
    f1_good, f1_bad = 2 * (1 / 2) * 1 / (1 / 2 + 1), 2 * 1 * (2 / 3) / (1 + 2 / 3)
    assert scores.accuracy == 0.75
    assert scores.macro_f1 == pytest.approx((f1_good + f1_bad) / 2)


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
    assert score_labels(predict_by_word_counts(make(200), make(50), test.texts), test.labels).accuracy >= 0.95


def test_recall_against_sorting():
    rng = np.random.default_rng(1)
    scores = rng.permutation(70).reshape(7, 10).astype(float)
    relevant = rng.random((7, 10)) < 0.3
    relevant[:, 0] = True
    for k in (1, 2, 5, 10):
        found = [any(relevant[q, c] for c in np.argsort(-scores[q])[:k]) for q in range(7)]
        assert recall_at(scores, relevant, k) == np.mean(found)


def test_constant_scores_find_nothing_that_is_not_there_anyway():
    relevant = np.eye(4, dtype=bool)
    assert recall_at(np.zeros((4, 4)), relevant, 1) == 0
    assert recall_at(np.zeros((4, 4)), relevant, 4) == 1


def test_both_directions():
    scores = np.array([[3.0, 2.0], [9.0, 1.0], [0.0, 5.0]])
    relevant = np.array([[True, False], [True, False], [False, True]])
    recalls = score_matches(scores, relevant)
    assert recalls.text_to_picture == (1.0, 1.0, 1.0)
    assert recalls.picture_to_text == (1.0, 1.0, 1.0)
    assert score_matches(-scores, relevant).picture_to_text[0] == 0


def test_chance_is_the_mean_over_all_orders():
    relevant = np.array([[True, False, True, False], [False, True, False, False]])
    for k, expected in zip(RANKS, chance(relevant).picture_to_text, strict=True):
        found = [
            np.mean([row[list(order[:k])].any() for order in itertools.permutations(range(4))]) for row in relevant
        ]
        assert expected == pytest.approx(np.mean(found))


def test_the_nearest_picture_is_that_of_its_colour_and_size():
    training = [draw_shape(c, s, z) for c in ("红色", "绿色", "蓝色") for s in ("圆形", "方块") for z in ("大", "小")]
    assert nearest_pictures(training[::-1], training).tolist() == list(range(len(training)))[::-1]
    query = draw_shape("蓝色", "三角形", "大")
    (nearest,) = nearest_pictures([query], training).tolist()
    assert training[nearest] in [draw_shape("蓝色", s, z) for s in ("圆形", "方块") for z in ("大", "小")]


def test_neighbours_prefer_the_caption_like_theirs():
    scores = match_by_neighbour(["红色的圆形"], ["红色的方块", "红色的圆形", "天上的云"])
    assert scores[0].argsort().tolist() == [2, 0, 1]
