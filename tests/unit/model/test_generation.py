"""Generation: cached against uncached, padding, beams, captions and continuations."""

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StaticCache
from transformers.cache_utils import DynamicCache

from m6.errors import UserError
from m6.generation.captioning import TextOnly, caption, continue_text


@pytest.fixture
def prompts(tiny_config):
    config = tiny_config()
    patch, bos = [config.image_token_id] * 4, config.bos_token_id
    return [[*patch, 1, 2, 3, bos], [bos, 5], [*patch, bos], [4, 5, 6, 7, 8, 9, 10, bos, 11]]


def left_pad(config, rows, width=None):
    width = width or max(map(len, rows))
    return torch.tensor([[config.pad_token_id] * (width - len(row)) + row for row in rows])


@pytest.fixture
def pictures():
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def reference_greedy(model, row, picture, steps):
    """The whole row again for each token, by the plain forward pass; types and positions by hand."""
    start = row.index(model.config.bos_token_id)
    row = list(row)
    for _ in range(steps):
        patches = row.count(model.config.image_token_id) if picture is not None else 0
        types = [0] * patches + [1] * (start - patches) + [2] * (len(row) - start)
        positions = [*range(patches), *range(start - patches), *range(len(row) - start)]
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([row]),
                token_type_ids=torch.tensor([types]),
                position_ids=torch.tensor([positions]),
                pixel_values=picture,
            ).logits
        row.append(int(logits[0, -1].argmax()))
        if row[-1] == model.config.eos_token_id:
            break
    return row


@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_greedy_of_a_padded_batch_is_that_of_each_row(tiny_model, prompts, pictures, options):
    model = tiny_model()
    given = {0: pictures[:1], 2: pictures[1:]}
    batch = left_pad(model.config, prompts, width=12)
    generated = model.generate(input_ids=batch, pixel_values=pictures, max_new_tokens=8, do_sample=False, **options)
    for index, row in enumerate(prompts):
        expected = reference_greedy(model, row, given.get(index), 8)
        assert generated[index].tolist()[12 - len(row) :][: len(expected)] == expected
        assert set(generated[index].tolist()[12 - len(row) + len(expected) :]) <= {model.config.pad_token_id}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("static", [False, True])
def test_cached_logits_equal_uncached(tiny_model, pack, samples, dtype, static):
    model = tiny_model().to(dtype)
    batch = pack(model.config, [samples[:1], samples[3:]], left=2)
    mask = (batch["sample_ids"] != 0).long()
    names = ("input_ids", "token_type_ids", "position_ids")
    length = mask.shape[1]
    with torch.no_grad():
        whole = model(**{name: batch[name] for name in names}, attention_mask=mask, pixel_values=batch["pixel_values"])
        for steps in ([10, 1, 1, 1, 1], [10, 2, 2]):  # the prefix is within the first 10
            cache = StaticCache(model.config, max_cache_len=length + 3) if static else DynamicCache()
            start, logits = 0, []
            for step in (*steps, length - sum(steps)):
                end = start + step
                pixels = batch["pixel_values"] if start == 0 else None
                part = {name: batch[name][:, start:end] for name in names}
                output = model(**part, attention_mask=mask[:, :end], pixel_values=pixels, past_key_values=cache)
                logits.append(output.logits)
                start = end
                if start == length:
                    break
            # fp32: a few roundings of sums in another order, relative to logits of size 10.
            torch.testing.assert_close(torch.cat(logits, dim=1), whole.logits, atol=1e-5, rtol=1e-5)


def test_source_after_a_cache_is_refused(tiny_model, pack, samples):
    model = tiny_model()
    batch = pack(model.config, [samples[3:]])
    names = ("input_ids", "token_type_ids", "position_ids")
    cache = model(**{name: batch[name][:, :1] for name in names}, use_cache=True).past_key_values
    with pytest.raises(UserError, match="follow 1 cached"):
        model(**{name: batch[name][:, 1:4] for name in names}, past_key_values=cache)
    new = {name: batch[name][:, 3:6] for name in names}
    for name in ("attention_mask", "sample_ids"):
        with pytest.raises(UserError, match=f"{name} has 1 columns, but there are 4 tokens"):
            model(**new, **{name: torch.ones(1, 1)}, past_key_values=cache)
    with pytest.raises(UserError, match="position_ids"):
        model(input_ids=batch["input_ids"][:, 3:4].repeat(2, 1), past_key_values=cache)


def test_given_types_positions_and_mask_change_nothing(tiny_model, pack, prompts, pictures):
    model = tiny_model()
    batch = left_pad(model.config, prompts[:1], width=10)
    types = torch.tensor([[0] * 6 + [1] * 3 + [2]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3, 0, 1, 2, 0]])
    mask = torch.tensor([[0, 0] + [1] * 8])
    derived = model.generate(input_ids=batch, pixel_values=pictures[:1], max_new_tokens=5)
    given = model.generate(
        input_ids=batch,
        pixel_values=pictures[:1],
        attention_mask=mask,
        token_type_ids=types,
        position_ids=positions,
        max_new_tokens=5,
    )
    assert torch.equal(derived, given)


def test_beams_of_a_padded_batch_are_those_of_each_row(tiny_model, prompts, pictures):
    model = tiny_model()
    given = {0: pictures[:1], 2: pictures[1:]}
    options = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    together = model.generate(input_ids=left_pad(model.config, prompts), pixel_values=pictures, **options)
    for index, row in enumerate(prompts):
        alone = model.generate(input_ids=torch.tensor([row]), pixel_values=given.get(index), **options)[0].tolist()
        found = together[index].tolist()[9 - len(row) :]
        assert found[: len(alone)] == alone[: len(found)]


def test_sampling_follows_the_seed(tiny_model, prompts, pictures):
    model = tiny_model()
    batch = left_pad(model.config, prompts)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model.generate(input_ids=batch, pixel_values=pictures, do_sample=True, max_new_tokens=6, top_k=0))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2][:, : draws[0].shape[1]])


def test_a_generated_placeholder_is_no_picture(tiny_model, prompts):
    model = tiny_model()
    forced = [[model.config.image_token_id]]
    for use_cache in (True, False):
        output = model.generate(
            input_ids=torch.tensor([prompts[1]]),
            max_new_tokens=3,
            use_cache=use_cache,
            prefix_allowed_tokens_fn=lambda batch, ids: forced[0],
        )
        assert output[0].tolist() == prompts[1] + forced[0] * 3


def test_a_generated_bos_opens_no_new_target(tiny_model, prompts, pictures):
    model = tiny_model()
    prompt = torch.tensor(prompts[:1])

    def bos_first(_, ids):
        return [model.config.bos_token_id] if len(ids) == prompt.shape[1] else list(range(model.config.vocab_size))

    options = {"max_new_tokens": 5, "prefix_allowed_tokens_fn": bos_first}
    cached = model.generate(
        prompt, pixel_values=pictures[:1], return_dict_in_generate=True, output_logits=True, **options
    )
    whole = model.generate(
        prompt, pixel_values=pictures[:1], return_dict_in_generate=True, output_logits=True, use_cache=False, **options
    )
    assert torch.equal(cached.sequences, whole.sequences)
    # generate hands logits out in fp32.
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(whole.logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2, 3], "has no <bos>"),
        ([44] * 8 + [41], "8 <image> placeholders"),
        ([], "at least <bos>"),
        ([41, 5, 40], "a prompt ends in padding, which generate would continue; pad on the left"),
    ],
)
def test_bad_prompts(tiny_model, row, message):
    with pytest.raises(UserError, match=message):
        tiny_model().generate(input_ids=torch.tensor([row]) if row else None, max_new_tokens=2)


def test_a_target_beyond_the_positions_is_refused_before_it_starts(tiny_model):
    model = tiny_model()
    prompt = torch.tensor([[model.config.bos_token_id, 1]])
    model.generate(input_ids=prompt, max_new_tokens=31, min_new_tokens=31)
    with pytest.raises(UserError, match=r"34 tokens.*max_position_embeddings 32"):
        model.generate(input_ids=prompt, max_new_tokens=32)
    # transformers takes what a configuration leaves open from the model's own.
    model.generation_config.max_new_tokens = 32
    with pytest.raises(UserError, match=r"34 tokens.*max_position_embeddings 32"):
        model.generate(input_ids=prompt, generation_config=GenerationConfig(do_sample=False))


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_source_beyond_the_positions_is_refused(tiny_model, pictures, use_cache):
    model = tiny_model()
    patches, bos, options = [model.config.image_token_id] * 4, model.config.bos_token_id, {"max_new_tokens": 2}
    longest = torch.tensor([[*patches, *[1] * 32, bos]])
    model.generate(input_ids=longest, pixel_values=pictures[:1], use_cache=use_cache, **options)
    longer = torch.tensor([[*patches, *[1] * 33, bos]])
    with pytest.raises(UserError, match=r"the source has 33 tokens, but the model has 32 positions"):
        model.generate(input_ids=longer, pixel_values=pictures[:1], use_cache=use_cache, **options)
    with pytest.raises(UserError, match=r"the source has 33 tokens, but the model has 32 positions"):
        model(input_ids=longer, pixel_values=pictures[:1])


class Tokenizer:
    """Letters a..z are ids 0..25."""

    def encode_ids(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)


class Processor:
    tokenizer = Tokenizer()

    def __init__(self, config, pictures):
        self.config, self.pictures = config, pictures

    def __call__(self, images, text):
        patches, bos = [self.config.image_token_id] * self.config.num_patches, self.config.bos_token_id
        rows = [[*patches, *self.tokenizer.encode_ids(source), bos] for source in text or [""] * len(images)]
        return {"input_ids": left_pad(self.config, rows), "pixel_values": self.pictures[: len(images)]}


def test_text_only_scores(tiny_config):
    config = tiny_config()
    scores = TextOnly(config)(None, torch.zeros(2, config.vocab_size))
    allowed = [*range(config.text_vocab_size), config.eos_token_id]
    assert (scores[:, allowed] == 0).all()
    assert torch.isinf(scores).sum() == 2 * (config.vocab_size - len(allowed))


def test_captions_and_continuations(tiny_model, pictures):
    model = tiny_model(text_vocab_size=26)
    processor = Processor(model.config, pictures)
    captions = caption(model, processor, ["first", "second"], num_beams=2, max_new_tokens=5)
    assert len(captions) == 2
    assert (
        captions[1]
        == caption(model, Processor(model.config, pictures[1:]), ["second"], num_beams=2, max_new_tokens=5)[0]
    )
    assert all(0 < len(text) <= 5 for text in captions)
    rows, generate = [], model.generate
    model.generate = lambda ids, **options: rows.append(len(ids)) or generate(ids, **options)
    three = caption(model, processor, ["first", "second", "first"], num_beams=2, max_new_tokens=5, batch_size=2)
    assert three == [*captions, captions[0]]
    assert rows == [2, 1]

    # A question is the source beside its picture.
    settings = {"num_beams": 2, "max_new_tokens": 5}
    answers = caption(model, processor, ["first", "second"], ["what", "who"], **settings)
    row = [*[model.config.image_token_id] * 4, *Tokenizer().encode_ids("what"), model.config.bos_token_id]
    expected = model.generate(
        torch.tensor([row]),
        pixel_values=pictures[:1],
        logits_processor=LogitsProcessorList([TextOnly(model.config)]),
        **settings,
    )
    written = [token for token in expected[0].tolist()[len(row) :] if token < 26]
    assert answers[0] == Tokenizer().decode(written)
    in_parts = caption(model, processor, ["first"] * 2, ["what", "who"], batch_size=1, **settings)
    assert in_parts[0] == answers[0]
    assert in_parts[1] == caption(model, processor, ["first"], ["who"], **settings)[0]

    texts = continue_text(model, processor, ["hello", "a"], max_new_tokens=4)
    assert texts[0].startswith("hello")
    assert texts[1].startswith("a")
    bare = torch.tensor([[model.config.bos_token_id, 0]])
    with torch.no_grad():
        logits = model(input_ids=bare).logits[0, -1]
    best = max([*range(26), model.config.eos_token_id], key=lambda token: float(logits[token]))
    assert texts[1][1:2] == ("" if best == model.config.eos_token_id else chr(ord("a") + best))
