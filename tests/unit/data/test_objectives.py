import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from m6.data.objectives import (
    OBJECTIVES,
    BadRow,
    ObjectivesSettings,
    Sample,
    make_example,
    mask_spans,
    max_text_tokens,
    shuffle_sentences,
    source_kind,
    target_ids,
)
from m6.errors import UserError
from m6.tokenizers import load_text_tokenizer
from tests.fixtures.tiny_data import build_tiny_tokenizer

PRETRAINING = OBJECTIVES[:4]
MASK = -1
TEXT = "今天早上，小明公园里看书。昨天，妈妈家里种花！周末，熊猫山上吃竹子。"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_text_tokenizer(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def make(objective, sample, tokenizer, seed=0, max_tokens=1000, **changes):
    return make_example(
        objective, sample, np.random.default_rng(seed), tokenizer, ObjectivesSettings(**changes), max_tokens
    )


def test_the_objectives_and_their_sources():
    assert PRETRAINING == ("text_denoising", "language_modelling", "image_captioning", "image_text_denoising")
    assert [source_kind(name) for name in PRETRAINING] == ["text", "text", "image_text", "image_text"]
    assert [ObjectivesSettings().of(name).weight > 0 for name in OBJECTIVES] == [True] * 4 + [False] * (
        len(OBJECTIVES) - 4
    ), "what fine-tunes is off unless a run asks for it"


def test_language_modelling_and_captioning_have_no_source(tokenizer):
    ids = tokenizer.encode_ids(TEXT)
    sample = Sample(id="a", text=TEXT, image=b"bytes")
    plain = make("language_modelling", sample, tokenizer)
    assert (plain.source_ids, plain.target_ids, plain.image) == ([], ids, None)
    caption = make("image_captioning", sample, tokenizer)
    assert (caption.source_ids, caption.target_ids, caption.image) == ([], ids, b"bytes")
    assert [make(name, sample, tokenizer).objective_id for name in PRETRAINING] == [0, 1, 2, 3]


def test_hidden_codes_are_predicted_in_place(tokenizer):
    codes = [3, 1, 0, 15, 7, 7, 2, 9]
    sample = Sample(id="a", text=TEXT, image=b"bytes", codes=codes)
    boi, eoi, mask = tokenizer.boi_token_id, tokenizer.eoi_token_id, tokenizer.code_mask_token_id
    target = [boi, *map(tokenizer.image_code_to_id, codes), eoi]
    shares, dropped = [], 0
    for seed in range(400):
        example = make("image_code_denoising", sample, tokenizer, seed)
        assert example.in_place
        assert example.target_ids == target
        dropped += example.source_ids == []
        assert example.source_ids in ([], tokenizer.encode_ids(TEXT))
        pairs = list(zip(example.corrupted_target_ids, target, strict=True))
        assert all(read in (true, mask) for read, true in pairs)
        assert pairs[0][0] == boi
        assert pairs[-1][0] == eoi
        shares.append(sum(read == mask for read, _ in pairs) / len(codes))
    assert min(shares) == 1 / 8
    assert max(shares) == 1
    # The mean of cos(pi u / 2) is 2 / pi = 0.637; rounding to eighths and the least of one add 0.004.
    assert np.mean(shares) == pytest.approx(0.64, abs=0.05)
    assert 20 < dropped < 65, "a tenth of 400"
    with pytest.raises(BadRow, match="no image codes"):
        make("image_code_denoising", Sample(id="a", text=TEXT, image=b"bytes"), tokenizer)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=200),
    st.floats(0.01, 0.99),
    st.floats(1, 10),
    st.integers(0, 2**32),
)
def test_masked_spans(ids, mask_ratio, mean_span_length, seed):
    numbered = list(range(len(ids)))  # all different, so that what is left tells what was masked
    rng = np.random.default_rng(seed)
    masked = mask_spans(numbered, rng, mask_ratio=mask_ratio, mean_span_length=mean_span_length, mask_id=MASK)
    kept = [token for token in masked if token != MASK]
    assert kept == sorted(kept)
    assert len(numbered) - len(kept) == max(1, round(mask_ratio * len(numbered)))
    assert 1 <= masked.count(MASK) <= len(numbered) - len(kept)
    assert len(masked) <= len(numbered)
    # Each mask stands exactly for the missing run at its place.
    rebuilt = []
    for index, token in enumerate(masked):
        if token != MASK:
            rebuilt.append(token)
            continue
        following = masked[index + 1] if index + 1 < len(masked) else len(numbered)
        assert following != MASK
        begin = rebuilt[-1] + 1 if rebuilt else 0
        assert following > begin
        rebuilt += range(begin, following)
    assert rebuilt == numbered


def test_mean_span_length():
    rng = np.random.default_rng(0)
    ids = list(range(10_000))
    masked = mask_spans(ids, rng, mask_ratio=0.15, mean_span_length=3.0, mask_id=MASK)
    # 1,500 masked tokens in spans of 1 + Poisson(2): the mean of 500 spans has a standard error of 0.06.
    assert 1500 / masked.count(MASK) == pytest.approx(3.0, abs=0.3)
    single = mask_spans(ids, rng, mask_ratio=0.15, mean_span_length=1.0, mask_id=MASK)
    assert single.count(MASK) == 1500


def test_every_position_is_masked_equally_often():
    counts = np.zeros(20)
    rng = np.random.default_rng(0)
    for _ in range(4000):
        kept = mask_spans(list(range(20)), rng, mask_ratio=0.2, mean_span_length=1.0, mask_id=MASK)
        counts[[i for i in range(20) if i not in kept]] += 1
    # Masks of one token that may not touch favour the two ends a little, and nothing else.
    assert counts.sum() == 4 * 4000
    assert np.ptp(counts[2:-2]) < 0.25 * counts.mean()


def test_shuffled_sentences(tokenizer):
    ids = tokenizer.encode_ids(TEXT)
    orders = set()
    for seed in range(60):
        shuffled = shuffle_sentences(ids, np.random.default_rng(seed), tokenizer)
        assert sorted(shuffled) == sorted(ids)
        sentences = tokenizer.split_sentence_ids(shuffled)
        assert sorted(sentences) == sorted(tokenizer.split_sentence_ids(ids))
        orders.add(tokenizer.decode(shuffled))
    assert len(orders) == 6  # every order of three sentences comes up
    assert TEXT in orders


@given(
    st.sampled_from(PRETRAINING),
    st.lists(st.sampled_from(["今天，小明公园里看书。", "红色圆形", "hello 12 ", "！", "𠮷"]), min_size=1, max_size=12),
    st.integers(0, 2**32),
    st.integers(20, 80),
)
def test_every_example_fits_and_targets_the_text(tokenizer, objective, parts, seed, sequence_length):
    text, num_patches = "".join(parts), 4
    max_tokens = max_text_tokens(objective, sequence_length, num_patches)
    sample = Sample(id="a", text=text, image=b"bytes")
    example = make(objective, sample, tokenizer, seed, max_tokens)
    assert example.target_ids == tokenizer.encode_ids(text)[:max_tokens]
    patches = num_patches if example.image else 0
    assert patches + len(example.source_ids) + 1 + len(example.target_ids) + 1 <= sequence_length
    assert example == make(objective, sample, tokenizer, seed, max_tokens)
    # The source holds nothing but masks and parts of the text that was cut: no token beyond the cut leaks in.
    source = collections.Counter(token for token in example.source_ids if token != tokenizer.mask_token_id)
    assert source <= collections.Counter(example.target_ids)
    if source_kind(objective) == "text":
        assert example.image is None


def test_denoising_source_reads_as_the_masked_text(tokenizer):
    sample = Sample(id="a", text="今天早上，小明公园里看书。", image=b"bytes")
    ids = tokenizer.encode_ids(sample.text)
    for objective in ("text_denoising", "image_text_denoising"):
        example = make(objective, sample, tokenizer, seed=3)
        source = tokenizer.decode(example.source_ids)
        before, after = source.split("<mask>", 1)
        assert sample.text.startswith(before)
        assert sample.text.endswith(after.rsplit("<mask>", 1)[-1])
        hidden = len(ids) - len([t for t in example.source_ids if t != tokenizer.mask_token_id])
        assert hidden == max(1, round(0.15 * len(ids)))


def test_order_is_kept_when_shuffling_is_off(tokenizer):
    changes = {"text_denoising": {"shuffle_sentences": False}}
    for seed in range(10):
        example = make("text_denoising", Sample(id="a", text=TEXT), tokenizer, seed, **changes)
        kept = iter(example.target_ids)
        assert all(token in kept for token in example.source_ids if token != tokenizer.mask_token_id)


def test_max_text_tokens():
    assert [max_text_tokens(name, 128, 16) for name in PRETRAINING] == [63, 126, 110, 55]
    assert max_text_tokens("text_to_image", 128, 16, 64) == 60


def test_text_to_image(tokenizer):
    sample = Sample(id="a", text="红色圆形", image=b"bytes", codes=[3, 0, 15])
    ids, first = tokenizer.encode_ids(sample.text), tokenizer.image_code_to_id(0)
    examples = [
        make("text_to_image", sample, tokenizer, seed, text_to_image={"caption_dropout": 0.3}) for seed in range(400)
    ]
    codes = [first + 3, first, first + 15]
    for example in examples:
        assert example.target_ids == [tokenizer.boi_token_id, *codes, tokenizer.eoi_token_id]
        assert example.image is None, "the picture is written, not read"
        assert example.source_ids in ([], ids)
    # 400 draws of 0.3: the standard error is 0.023.
    assert sum(not example.source_ids for example in examples) / 400 == pytest.approx(0.3, abs=0.1)
    assert target_ids("text_to_image", sample, tokenizer, 100) == examples[0].target_ids
    assert target_ids("image_captioning", sample, tokenizer, 100) == ids
    with pytest.raises(ValueError, match="image code 16 is outside"):
        make("text_to_image", Sample(id="a", text="红", codes=[16]), tokenizer)


def test_codes_are_hidden_where_they_are_read(tokenizer):
    sample = Sample(id="a", text="红色圆形", codes=[3, 0, 15, 7] * 64)
    ids = [tokenizer.boi_token_id, *map(tokenizer.image_code_to_id, sample.codes), tokenizer.eoi_token_id]
    shares = []
    for seed in range(200):
        example = make("text_to_image", sample, tokenizer, seed, text_to_image={"code_dropout": 0.8})
        assert example.target_ids == ids
        hidden = [read == tokenizer.code_mask_token_id for read in example.corrupted_target_ids]
        assert all(hide or read == id for hide, read, id in zip(hidden, example.corrupted_target_ids, ids, strict=True))
        assert not hidden[0]
        assert not hidden[-1]
        shares.append(sum(hidden) / 256)
    # Shares are even from 0 to 0.8: the standard error of their mean is 0.016.
    assert sum(shares) / 200 == pytest.approx(0.4, abs=0.06)
    assert min(shares) < 0.1
    assert 0.7 < max(shares) < 0.9
    assert make("text_to_image", sample, tokenizer).corrupted_target_ids is None


@pytest.mark.parametrize(
    ("objective", "sample", "reason"),
    [
        ("language_modelling", Sample(id="a", text=" \u3000"), "empty text"),
        ("image_captioning", Sample(id="a", text="", image=b"bytes"), "empty text"),
        ("image_text_denoising", Sample(id="a", text="红色"), "no image"),
        ("text_to_image", Sample(id="a", text=" ", codes=[1]), "empty text"),
        ("text_to_image", Sample(id="a", text="红色"), "no image codes"),
    ],
)
def test_bad_rows(tokenizer, objective, sample, reason):
    with pytest.raises(BadRow, match=reason):
        make(objective, sample, tokenizer)


def test_settings_are_checked():
    with pytest.raises(ValidationError, match="mask_ration"):
        ObjectivesSettings(text_denoising={"mask_ration": 0.3})
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        ObjectivesSettings(language_modelling={"weight": -1})
    with pytest.raises(UserError, match='did you mean "text_denoising"'):
        ObjectivesSettings().of("text_denoise")
