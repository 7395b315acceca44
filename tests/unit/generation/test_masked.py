"""Drawing all codes in a few passes: against a loop by hand, what is kept, codebooks, repainting's known codes."""

import math

import pytest
import torch

from m6.errors import UserError
from m6.generation.drawing import (
    HIDDEN,
    Draft,
    draw_codes,
    draw_masked,
    num_masked_numbers,
    num_steps,
    resolve_sampling,
)
from m6.generation.sampling import Sampling, uniform_numbers
from tests.fixtures.drawing import Grid
from tests.fixtures.tiny_data import TINY_IMAGE_VOCAB_SIZE

CODES, BOOKS = 8, 2
NOISE = 4.5
GRID = Grid(TINY_IMAGE_VOCAB_SIZE, BOOKS, CODES)
CAPTIONS = ["红色圆形", "一个大的蓝色三角形。", "小"]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(code_grid_size=2, codes_per_place=BOOKS)


def numbers_of(count, sampling, seed=0):
    number = num_masked_numbers(GRID, sampling)
    return torch.stack([uniform_numbers(seed, "红", index, number) for index in range(count)])


def draw(model, processor, captions=CAPTIONS, known=None, numbers=None, **options):
    sampling = Sampling(**{"temperature": 1.0} | options)
    numbers = numbers_of(len(captions), sampling) if numbers is None else numbers
    return draw_masked(model, processor, captions, numbers, grid=GRID, sampling=sampling, known=known)


def by_hand(model, tokenizer, caption, numbers, guidance, passes, known, noise=NOISE, greedy=False):
    """One picture alone, code after code, with Python's own numbers."""
    codes, first = list(known), tokenizer.image_code_to_id(0)
    size, total = GRID.codebook_size // BOOKS, known.count(HIDDEN)
    for step, (draws, noises) in enumerate(numbers.view(passes, 2, CODES).tolist()):
        logits = []
        for source in (tokenizer.encode_ids(caption), []):
            inputs = [first + code if code != HIDDEN else tokenizer.code_mask_token_id for code in codes]
            target = [
                tokenizer.bos_token_id,
                tokenizer.boi_token_id,
                *inputs,
                tokenizer.eoi_token_id,
                tokenizer.eos_token_id,
            ]
            row = [*source, *target]
            output = model(
                input_ids=torch.tensor([row]),
                token_type_ids=torch.ones(1, len(row), dtype=torch.int64),
                position_ids=torch.tensor([[*range(len(source)), *range(len(target))]]),
            )
            logits.append(output.logits[0, len(source) + 2 : len(source) + 2 + CODES, first:].double())
        conditional, unconditional = logits
        certainty = {}
        done = (step + 1) / passes
        for index in [place for place, code in enumerate(codes) if code == HIDDEN]:
            book = slice(index % BOOKS * size, (index % BOOKS + 1) * size)
            scores = unconditional[index, book] + guidance * (conditional[index, book] - unconditional[index, book])
            probabilities = scores.float().double().softmax(-1)
            chosen = int(probabilities.argmax() if greedy else (probabilities.cumsum(-1) > draws[index]).nonzero()[0])
            codes[index] = book.start + chosen
            gumbel = -math.log(-math.log(noises[index]))
            certainty[index] = math.log(probabilities[chosen]) + noise * (1 - done) * gumbel
        num_again = math.floor(total * math.cos(math.pi / 2 * done))
        for index in sorted(certainty, key=certainty.__getitem__)[:num_again]:
            codes[index] = HIDDEN
    return codes


@pytest.mark.parametrize(("guidance", "passes"), [(1.0, 3), (3.0, 4)])
def test_a_batch_draws_what_each_caption_draws_by_hand(model, processor, guidance, passes):
    options = {"guidance_scale": guidance, "passes": passes}
    numbers = numbers_of(3, Sampling(**options))
    known = torch.full((3, CODES), HIDDEN)
    known[1, 2], known[1, 5] = 3, TINY_IMAGE_VOCAB_SIZE - 1  # the second picture is a repainting
    drawn = draw(model, processor, known=known, numbers=numbers, **options)
    with torch.no_grad():
        expected = [
            by_hand(model, processor.tokenizer, caption, row, guidance, passes, given)
            for caption, row, given in zip(CAPTIONS, numbers, known.tolist(), strict=True)
        ]
    assert drawn.tolist() == expected
    assert expected[1][2] == 3
    assert expected[1][5] == TINY_IMAGE_VOCAB_SIZE - 1
    assert len({tuple(row) for row in expected}) == 3


@pytest.mark.parametrize(("options", "noise"), [({"temperature": 0.0}, 0.0), ({"top_k": 1}, NOISE)])
def test_the_most_likely_codes_stay_by_their_certainty(model, processor, options, noise):
    options |= {"guidance_scale": 2.0, "passes": 5}
    numbers, known = numbers_of(3, Sampling(**options)), [HIDDEN] * CODES
    drawn = draw(model, processor, numbers=numbers, **options)
    with torch.no_grad():
        expected = [
            by_hand(model, processor.tokenizer, caption, row, 2.0, 5, known, noise, greedy=True)
            for caption, row in zip(CAPTIONS, numbers, strict=True)
        ]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("passes", [1, 3, 50])
def test_every_code_is_drawn_from_its_own_codebook(model, processor, passes):
    drawn = draw(model, processor, passes=passes)
    assert ((drawn // (TINY_IMAGE_VOCAB_SIZE // BOOKS)) == torch.arange(CODES) % BOOKS).all()


def test_guidance_of_zero_forgets_the_caption(model, processor):
    numbers = numbers_of(1, Sampling()).expand(3, -1)
    same = draw(model, processor, numbers=numbers, guidance_scale=0.0)
    assert (same == same[0]).all()
    assert not (draw(model, processor, numbers=numbers) == same).all()


def test_codes_see_each_other_in_both_directions(model, processor):
    """A known last code changes those before it."""
    known = torch.full((1, CODES), HIDDEN)
    found = set()
    for last in range(TINY_IMAGE_VOCAB_SIZE // 2, TINY_IMAGE_VOCAB_SIZE):
        known[0, -1] = last
        found.add(tuple(draw(model, processor, ["红"], known=known, passes=1)[0, :-1].tolist()))
    assert len(found) > 1


def test_a_picture_does_not_depend_on_those_beside_it(model, processor):
    model.decodings = ["masked"]
    sampling = resolve_sampling(model, Sampling(passes=4))
    drafts = [Draft(caption, seed=5, index=1) for caption in CAPTIONS]
    together = draw_codes(model, processor, drafts, grid=GRID, sampling=sampling)
    alone = [draw_codes(model, processor, [draft], grid=GRID, sampling=sampling) for draft in drafts]
    assert torch.equal(together, torch.cat(alone))
    assert num_steps(GRID, sampling) == 4


def test_the_decoding_is_what_the_model_was_trained_for(model):
    model.decodings = ["masked", "left_to_right"]
    assert resolve_sampling(model, Sampling()).decoding == "masked"
    assert resolve_sampling(model, Sampling(decoding="left_to_right")).decoding == "left_to_right"
    assert num_steps(GRID, resolve_sampling(model, Sampling(decoding="left_to_right"))) == CODES
    model.decodings = ["left_to_right"]
    with pytest.raises(UserError, match=r'"masked": .* m6.objectives.image_code_denoising; it draws with "left_to_r'):
        resolve_sampling(model, Sampling(decoding="masked"))
    assert resolve_sampling(model, Sampling()).decoding == "left_to_right"
    with pytest.raises(UserError, match="passes 3 is for the decoding masked"):
        resolve_sampling(model, Sampling(passes=3))
    model.decodings = []
    with pytest.raises(UserError, match="not been trained to draw"):
        resolve_sampling(model, Sampling())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"passes": 0}, "passes must be at least 1, found 0"), ({"decoding": "mask"}, 'did you mean "masked"')],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
