"""Labels and matches as targets: what an example holds, what is refused, how pairs are drawn."""

import collections
import dataclasses

import numpy as np
import pytest

from m6.data.collate import IGNORED_LABEL
from m6.data.objectives import (
    MATCH,
    MAX_ANSWER_TOKENS,
    NO_MATCH,
    OBJECTIVES,
    BadRow,
    ObjectivesSettings,
    Sample,
    make_example,
    max_text_tokens,
    pair,
)
from m6.data.pretraining import PretrainingData
from m6.data.settings import DataSettings
from m6.tokenizers import load_text_tokenizer
from tests.fixtures.tiny_data import build_labelled_data, build_tiny_data, build_tiny_tokenizer, draw_shape


def test_a_question_stands_for_the_text(tokenizer):
    sample = Sample(id="a", text="", image=b"bytes", question="什么颜色？", answer="红色")
    rng = np.random.default_rng(0)
    example = make_example("visual_question_answering", sample, rng, tokenizer, ObjectivesSettings(), 100)
    assert example.source_ids == tokenizer.encode_ids("什么颜色？")
    assert example.target_ids == tokenizer.encode_ids("红色")
    assert example.image == b"bytes"
    for changes, reason in (
        ({"question": None}, "no question"),
        ({"answer": ""}, "no answer"),
        ({"image": None}, "no im"),
    ):
        broken = dataclasses.replace(sample, **changes)
        with pytest.raises(BadRow, match=reason):
            make_example("visual_question_answering", broken, rng, tokenizer, ObjectivesSettings(), 100)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    return build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_text_tokenizer(tokenizer_folder)


def example(objective, sample, tokenizer, max_tokens=40):
    return make_example(objective, sample, np.random.default_rng(0), tokenizer, ObjectivesSettings(), max_tokens)


def test_a_text_is_the_source_and_its_label_the_target(tokenizer):
    made = example("text_classification", Sample(id="0", text="红色的熊猫", answer="好评"), tokenizer)
    assert made.source_ids == tokenizer.encode_ids("红色的熊猫")
    assert made.target_ids == tokenizer.encode_ids("好评")
    assert made.image is None
    cut = example("text_classification", Sample(id="0", text="红色的熊猫" * 40, answer="好评"), tokenizer, max_tokens=5)
    assert len(cut.source_ids) == 5
    assert cut.target_ids == made.target_ids


@pytest.mark.parametrize(("answer", "reason"), [(None, "no answer"), ("", "no answer"), ("七" * 99, "more than 16")])
def test_rows_without_a_usable_label_are_bad(tokenizer, answer, reason):
    with pytest.raises(BadRow, match=reason):
        example("text_classification", Sample(id="0", text="红色", answer=answer), tokenizer)


def test_the_context_follows_the_text_if_it_is_asked_for(tokenizer):
    settings = ObjectivesSettings.model_validate({"text_classification": {"with_context": True}})

    def source(max_tokens, context):
        sample = Sample(id="0", text="红色的熊猫", answer="好评", context=context)
        return make_example(
            "text_classification", sample, np.random.default_rng(0), tokenizer, settings, max_tokens
        ).source_ids

    text, context = tokenizer.encode_ids("红色的熊猫"), tokenizer.encode_ids("小明在公园里")
    assert source(40, "小明在公园里") == [*text, tokenizer.sep_token_id, *context]
    assert source(len(text) + 3, "小明在公园里") == [*text, tokenizer.sep_token_id, *context[:2]]
    for room, missing in ((len(text), "小明"), (len(text) + 1, "小明"), (40, None), (40, "")):
        assert source(room, missing) == text
    without = Sample(id="0", text="红色的熊猫", answer="好评", context="小明")
    assert example("text_classification", without, tokenizer).source_ids == text


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("一二三。四五六。", "四五六。"),
        ("一。二。三四五六七八九。", "三四五六七八九。"),
        ("一二三四五六。七。", "七。"),
    ],
)
def test_a_continuation_begins_with_the_sentence_nearest_to_the_middle(tokenizer, text, rest):
    made = example("text_continuation", Sample(id="0", text=text), tokenizer)
    assert [*made.source_ids, *made.target_ids] == tokenizer.encode_ids(text)
    assert tokenizer.decode(made.target_ids) == rest
    with pytest.raises(BadRow, match="one sentence"):
        example("text_continuation", Sample(id="0", text="一二三四"), tokenizer)


def test_a_match_shows_the_picture_and_a_text(tokenizer):
    picture = draw_shape("红色", "圆形", "大")
    made = example("image_text_matching", Sample(id="0", text="红色", image=picture, answer=MATCH), tokenizer)
    assert (made.source_ids, made.target_ids) == (tokenizer.encode_ids("红色"), tokenizer.encode_ids(MATCH))
    assert made.image == picture
    with pytest.raises(BadRow, match="no image"):
        example("image_text_matching", Sample(id="0", text="红色", answer=MATCH), tokenizer)


@pytest.mark.parametrize(("objective", "patches"), [("text_classification", 0), ("image_text_matching", 4)])
def test_the_longest_text_leaves_room_for_the_answer(objective, patches):
    assert patches + max_text_tokens(objective, 64, patches) + 2 + MAX_ANSWER_TOKENS == 64


def test_pairs_are_as_often_true_as_false():
    rng = np.random.default_rng(0)
    sample = Sample(id="0", text="红色")
    drawn = [pair(sample, "蓝色", rng) for _ in range(2000)]
    assert {(made.text, made.answer) for made in drawn} == {("红色", MATCH), ("蓝色", NO_MATCH)}
    # 5 standard deviations of a fair coin.
    assert abs(sum(made.answer == MATCH for made in drawn) - 1000) < 5 * 2000**0.5 / 2
    assert all(pair(sample, "红色", rng).answer == MATCH for _ in range(20))


def open_data(folder, tokenizer_folder, **weights):
    objectives = {name: {"weight": weights.get(name, 0.0)} for name in OBJECTIVES}
    return PretrainingData(
        DataSettings(path=folder, tokenizer=tokenizer_folder, sequence_length=64),
        ObjectivesSettings.model_validate(objectives),
        seed=3,
        micro_batch_size=8,
        image_size=32,
        patch_size=16,
    )


def targets_of(batch, tokenizer):
    rows = zip(batch.labels.tolist(), batch.sample_ids.tolist(), strict=True)
    texts = collections.Counter()
    for labels, samples in rows:
        for number in set(samples) - {0}:
            ids = [t for t, s in zip(labels, samples, strict=True) if s == number and t != IGNORED_LABEL]
            assert ids[-1] == tokenizer.eos_token_id
            texts[tokenizer.decode(ids[:-1])] += 1
    return texts


def test_batches_of_labels_and_their_baseline_targets(tmp_path, tokenizer_folder, tokenizer):
    data = open_data(build_labelled_data(tmp_path / "data"), tokenizer_folder, text_classification=1.0)
    assert targets_of(data.micro_batch(0), tokenizer).keys() == {"好评", "差评"}
    assert targets_of(data.validation_micro_batches("text_classification", 4)[0], tokenizer) == {"好评": 2, "差评": 2}
    targets = [tokenizer.decode(ids) for ids in data.target_ids("text_classification", "reviews", "train")]
    assert targets == ["好评", "差评"] * 6


def test_batches_of_pairs_depend_on_their_number_alone(tmp_path, tokenizer_folder, tokenizer):
    folder = build_tiny_data(tmp_path / "data")
    first, second = (open_data(folder, tokenizer_folder, image_text_matching=1.0) for _ in range(2))
    second.micro_batch(5)
    assert first.micro_batch(2).input_ids.equal(second.micro_batch(2).input_ids)
    batch = first.micro_batch(0)
    assert batch.pixel_values.shape == (8, 3, 32, 32)
    seen = sum((targets_of(first.micro_batch(index), tokenizer) for index in range(8)), collections.Counter())
    assert seen.keys() == {MATCH, NO_MATCH}
    targets = [tokenizer.decode(ids) for ids in first.target_ids("image_text_matching", "tiny_shapes", "train")]
    assert len(targets) == 60
    assert set(targets) == {MATCH, NO_MATCH}
