"""Drawing codes: against a loop by hand without a cache, guidance, sampling, choosing candidates."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from m6.errors import UserError
from m6.generation.drawing import draw_left_to_right
from m6.generation.likelihood import caption_scores
from m6.generation.sampling import Sampling, draw_by_numbers, uniform_numbers
from tests.fixtures.drawing import Grid
from tests.fixtures.tiny_data import TINY_IMAGE_VOCAB_SIZE

CODES = 6
CAPTIONS = ["红色圆形", "一个大的蓝色三角形。", "小"]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(code_grid_size=3)


def uniform(count, seed=0):
    return torch.stack([uniform_numbers(seed, "红", index, CODES) for index in range(count)])


def draw(model, processor, captions=CAPTIONS, numbers=None, codebook_size=TINY_IMAGE_VOCAB_SIZE, **options):
    numbers = uniform(len(captions)) if numbers is None else numbers
    return draw_left_to_right(
        model,
        processor,
        captions,
        numbers,
        grid=Grid(codebook_size, 1, numbers.shape[1]),
        sampling=Sampling(**{"temperature": 1.0} | options),
    )


def by_hand(model, tokenizer, caption, numbers, guidance):
    """One caption alone, the whole row again for each code, types and positions written out."""
    codes, first = [], tokenizer.image_code_to_id(0)
    for number in numbers:
        scores = []
        for source in (tokenizer.encode_ids(caption), []):
            target = [tokenizer.bos_token_id, tokenizer.boi_token_id, *(first + code for code in codes)]
            row = [*source, *target]
            logits = model(
                input_ids=torch.tensor([row]),
                token_type_ids=torch.tensor([[1] * len(source) + [2] * len(target)]),
                position_ids=torch.tensor([[*range(len(source)), *range(len(target))]]),
            ).logits
            scores.append(logits[0, -1, first:].double())
        conditional, unconditional = scores
        probabilities = (unconditional + guidance * (conditional - unconditional)).softmax(-1)
        codes.append(int((probabilities.cumsum(-1) > number).nonzero()[0]))
    return codes


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_batch_draws_what_each_caption_draws_by_hand(model, processor, guidance):
    numbers = uniform(3)
    drawn = draw(model, processor, numbers=numbers, guidance_scale=guidance)
    with torch.no_grad():
        expected = [
            by_hand(model, processor.tokenizer, caption, row, guidance)
            for caption, row in zip(CAPTIONS, numbers.tolist(), strict=True)
        ]
    assert drawn.tolist() == expected
    assert len({tuple(row) for row in expected}) == 3


def test_guidance_of_zero_forgets_the_caption(model, processor):
    numbers = uniform(1).expand(3, -1)
    same = draw(model, processor, numbers=numbers, guidance_scale=0.0)
    assert (same == same[0]).all()
    assert not (draw(model, processor, numbers=numbers) == same).all()


def test_codes_stay_in_the_codebook(model, processor):
    numbers = torch.full((3, CODES), 1 - 2**-24, dtype=torch.float64)
    assert draw(model, processor, numbers=numbers, codebook_size=5).max() == 4
    assert draw(model, processor, numbers=torch.zeros(3, CODES), codebook_size=5).min() == 0


def test_codes_of_a_place_come_from_their_own_codebooks(model, processor):
    drawn = draw_left_to_right(
        model, processor, CAPTIONS, uniform(3), grid=Grid(TINY_IMAGE_VOCAB_SIZE, 2, CODES), sampling=Sampling()
    )
    half = TINY_IMAGE_VOCAB_SIZE // 2
    assert ((drawn // half) == torch.arange(CODES) % 2).all()
    assert len(set(drawn.flatten().tolist())) > 4


def test_temperature_zero_takes_the_best_whatever_the_numbers(model, processor):
    best = draw(model, processor, temperature=0.0)
    assert torch.equal(best, draw(model, processor, numbers=1 - uniform(3), temperature=0.0))
    assert torch.equal(best, draw(model, processor, top_k=1))
    assert torch.equal(best, draw(model, processor, top_p=1e-6))


def test_probabilities():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = scores.double().softmax(-1)
    assert torch.allclose(Sampling(temperature=1.0).probabilities(scores), plain)
    assert torch.allclose(Sampling().probabilities(scores), (scores.double() / 0.9).softmax(-1))
    assert torch.allclose(Sampling(temperature=0.5).probabilities(scores), (2 * scores.double()).softmax(-1))
    kept = Sampling(temperature=1.0, top_k=2).probabilities(scores)
    assert torch.allclose(kept, torch.tensor([[plain[0, 0], plain[0, 1], 0, 0]]) / plain[0, :2].sum())
    # 0.64 is not yet 0.7, so the second code is needed.
    assert (Sampling(temperature=1.0, top_p=0.7).probabilities(scores) > 0).tolist() == [[True, True, False, False]]


def test_drawing_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0], dtype=torch.float64)
    numbers = torch.from_numpy(np.random.default_rng(0).random(20_000))
    counts = torch.bincount(draw_by_numbers(probabilities.expand(20_000, -1), numbers), minlength=5) / 20_000
    # The standard error of a share of 20,000 is at most 0.0035.
    assert torch.allclose(counts.double(), probabilities, atol=0.015)
    assert counts[1] == counts[4] == 0


def test_random_numbers_depend_on_their_picture_alone():
    numbers = uniform_numbers(3, "熊猫", 1, 4)
    assert torch.equal(numbers, uniform_numbers(3, "熊猫", 1, 8)[:4])
    for other in (uniform_numbers(4, "熊猫", 1, 4), uniform_numbers(3, "猫", 1, 4), uniform_numbers(3, "熊猫", 2, 4)):
        assert not torch.equal(numbers, other)
    assert numbers.min() >= 0
    assert numbers.max() < 1


def test_a_caption_score_is_its_mean_log_likelihood(model, processor):
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)) for _ in CAPTIONS]
    scores = caption_scores(model, processor, images, CAPTIONS)
    for score, image, caption in zip(scores, images, CAPTIONS, strict=True):
        inputs = processor(images=[image], target_prefix=caption)
        ids = [*processor.tokenizer.encode_ids(caption), model.config.eos_token_id]
        with torch.no_grad():
            logits = model(**{**inputs, "pixel_values": inputs["pixel_values"].double()}).logits
        chosen = logits[0, -len(ids) :].log_softmax(-1)[range(len(ids)), ids]
        # The pictures are resized by Pillow here and there, in 8 bits or after them.
        assert float(score) == pytest.approx(float(chosen.mean()), abs=0.02)


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        ([""], "the caption '' is empty"),
        (["红", " "], "the caption ' ' is empty"),
        (["红色圆形" * 20], "the model reads 32"),
    ],
)
def test_captions_that_cannot_be_drawn(model, processor, captions, message):
    with pytest.raises(UserError, match=message):
        draw(model, processor, captions)
    with pytest.raises(UserError, match="31 codes does not fit into the model's max_position_embeddings 32"):
        draw(model, processor, ["红"], numbers=torch.zeros(1, 31))


def test_unknown_characters_are_read_in_bytes(model, processor):
    assert draw(model, processor, ["𠮷龘🦄"]).shape == (1, CODES)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": 1e-310},
        {"guidance_scale": -0.1},
        {"guidance_scale": math.inf},
        {"guidance_scale": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.1},
    ],
    ids=str,
)
def test_sampling_that_makes_no_sense(options):
    with pytest.raises(UserError, match=r"at least|from 0 to 1000|0\.001 to 1000|in \(0, 1\]"):
        Sampling(**options)
