"""The contracts of transformers' common tests of models and of generation; docs/guides/model.md names each.

The tests are our own. They ask for what the named tests of transformers ask, in the model's terms: prompts hold <bos>,
and no weight is tied, because the head uses the token embedding itself.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationMixin, TextStreamer
from transformers.cache_utils import DynamicCache

from m6.errors import UserError
from m6.model import M6ForConditionalGeneration

GREEDY = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6}


@pytest.fixture
def prompts(tiny_config):
    """A batch of two prompts that is padded on the left: with a picture, and of text alone."""
    config = tiny_config()
    rows = [[*[config.image_token_id] * 4, 1, 2, 3, config.bos_token_id, 4], [5, 6, config.bos_token_id, 7]]
    padded = [[config.pad_token_id] * (9 - len(row)) + row for row in rows]
    pictures = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"input_ids": torch.tensor(padded), "pixel_values": pictures.double()}


@pytest.fixture
def text_prompt(tiny_config):
    config = tiny_config()
    return {"input_ids": torch.tensor([[5, 6, 8, 9, config.bos_token_id, 7, 5, 6]])}


@torch.no_grad()
def test_rows_of_a_batch_are_those_alone(tiny_model, prompts):
    model = tiny_model()
    logits = model(**prompts).logits
    first = model(input_ids=prompts["input_ids"][:1], pixel_values=prompts["pixel_values"]).logits
    second = model(input_ids=prompts["input_ids"][1:, 5:]).logits
    torch.testing.assert_close(logits[0], first[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(logits[1, 5:], second[0], atol=1e-12, rtol=0)


@torch.no_grad()
def test_tuples_hold_what_the_outputs_hold(tiny_model, prompts):
    model = tiny_model()
    output = model(**prompts, output_hidden_states=True)
    as_tuple = model(**prompts, output_hidden_states=True, return_dict=False)
    assert torch.equal(as_tuple[0], output.logits)
    assert len(as_tuple) == len(output.to_tuple())


def test_hidden_states_and_their_gradients(tiny_model, prompts):
    model = tiny_model()
    output = model(**prompts, output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_layers + 1
    assert all(each.shape == (2, 9, model.config.hidden_size) for each in output.hidden_states)
    assert torch.equal(output.hidden_states[-1] @ model.get_input_embeddings().weight.T, output.logits)
    for each in output.hidden_states:
        each.retain_grad()
    output.logits.sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in output.hidden_states)
    assert model(**prompts).hidden_states is None
    model.config.output_hidden_states = True
    assert model(**prompts).hidden_states is not None


@torch.no_grad()
def test_some_logits_are_those_of_all(tiny_model, prompts):
    model = tiny_model()
    logits = model(**prompts).logits
    torch.testing.assert_close(model(**prompts, logits_to_keep=2).logits, logits[:, -2:], atol=1e-12, rtol=0)
    chosen = torch.tensor([3, 8])
    torch.testing.assert_close(model(**prompts, logits_to_keep=chosen).logits, logits[:, chosen], atol=1e-12, rtol=0)


def test_embeddings_can_be_replaced_and_not_resized(tiny_model, prompts):
    model = tiny_model()
    assert model.main_input_name == "input_ids"
    assert model.get_output_embeddings() is None, "the head uses the token embedding"
    before = model(**prompts).logits
    replaced = torch.nn.Embedding(model.config.vocab_size, model.config.hidden_size).double()
    model.set_input_embeddings(replaced)
    assert model.get_input_embeddings() is model.model.get_input_embeddings() is replaced
    assert not torch.equal(model(**prompts).logits, before)
    with pytest.raises(UserError, match="cannot be resized"):
        model.resize_token_embeddings(100)


def test_gradients_do_not_depend_on_checkpointing(tiny_model, prompts):
    model = tiny_model().train()
    gradients = []
    for kind in (None, {"use_reentrant": False}, {"use_reentrant": True}, None):
        if kind:
            model.gradient_checkpointing_enable(kind)
        elif gradients:
            model.gradient_checkpointing_disable()
        assert model.is_gradient_checkpointing is bool(kind)
        model.zero_grad()
        model(**prompts, labels=prompts["input_ids"]).loss.backward()
        gradients.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    assert len(gradients[0]) > 10
    for other in gradients[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients[0], other, strict=True))


def test_saving_loading_and_types(tiny_model, prompts, tmp_path):
    model = tiny_model().float()
    model.save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == model.state_dict().keys(), "no weight is tied"
    prompts["pixel_values"] = prompts["pixel_values"].float()
    expected = model.generate(**prompts, **GREEDY)
    for options, dtype in (
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
    ):
        loaded, report = M6ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert not any(report.values())
        assert {each.dtype for each in loaded.parameters()} == {dtype}
        generated = loaded.eval().generate(**prompts, **GREEDY)
        assert torch.equal(generated, expected) or dtype == torch.bfloat16
        assert generated.shape == expected.shape


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_accelerate_places_the_model(tiny_model, prompts, tmp_path, device_map):
    pytest.importorskip("accelerate")
    tiny_model().save_pretrained(tmp_path)
    loaded = M6ForConditionalGeneration.from_pretrained(tmp_path, device_map=device_map, dtype=torch.float64).eval()
    assert torch.equal(loaded.generate(**prompts, **GREEDY), tiny_model().generate(**prompts, **GREEDY))


def test_accelerate_keeps_layers_on_the_disk(tiny_model, prompts, tmp_path):
    pytest.importorskip("accelerate")
    tiny_model().save_pretrained(tmp_path)
    places = {"model.embeddings": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    loaded = M6ForConditionalGeneration.from_pretrained(
        tmp_path, device_map=places, offload_folder=tmp_path / "offloaded", dtype=torch.float64
    ).eval()
    assert loaded.model.layers[1].ffn.experts.w_in.is_meta, "a sparse layer"
    assert torch.equal(loaded.generate(**prompts, **GREEDY), tiny_model().generate(**prompts, **GREEDY))


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"do_sample": False}, 2),
        ({"do_sample": True, "top_k": 5, "temperature": 0.7}, 2),
        ({"do_sample": True, "num_return_sequences": 2}, 4),
        ({"num_beams": 3}, 2),
        ({"num_beams": 3, "num_return_sequences": 2}, 4),
        ({"num_beams": 3, "do_sample": True}, 2),
    ],
    ids=str,
)
def test_every_way_to_decode_and_what_it_returns(tiny_model, prompts, options, rows):
    model = tiny_model()
    lengths = {"max_new_tokens": 4, "min_new_tokens": 4}
    asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    torch.manual_seed(1)
    output = model.generate(**prompts, **options, **lengths, return_dict_in_generate=True, **asked)
    assert output.sequences.shape == (rows, 9 + 4)
    beams = options.get("num_beams", 1)
    expanded = 2 * beams if beams > 1 else rows
    assert [each.shape for each in output.scores] == [(expanded, model.config.vocab_size)] * 4
    assert len(output.hidden_states) == 4
    assert all(len(step) == model.config.num_layers + 1 for step in output.hidden_states)
    torch.manual_seed(1)
    assert torch.equal(model.generate(**prompts, **options, **lengths), output.sequences)
    torch.manual_seed(1)
    uncached = model.generate(**prompts, **options, **lengths, use_cache=False)
    assert torch.equal(uncached, output.sequences)
    assert isinstance(model, GenerationMixin)


def test_the_cache_has_the_standard_shape_and_can_be_continued(tiny_model, text_prompt):
    model = tiny_model()
    whole = model.generate(**text_prompt, **GREEDY)
    first = model.generate(
        **text_prompt, do_sample=False, max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True
    )
    cache = first.past_key_values
    assert isinstance(cache, DynamicCache)
    heads, length = model.config.num_attention_heads, first.sequences.shape[1] - 1
    assert cache.layers[0].keys.shape == (1, heads, length, model.config.hidden_size // heads)
    rest = {"do_sample": False, "max_new_tokens": 3, "min_new_tokens": 3}
    continued = model.generate(input_ids=first.sequences, past_key_values=cache, **rest)
    assert torch.equal(continued, whole)


def test_the_loop_of_the_documentation(tiny_model, prompts):
    """Positions after a cache are those of each row's target; the second row is padded."""
    model = tiny_model()
    expected = model.generate(**prompts, **GREEDY)
    mask = (prompts["input_ids"] != model.config.pad_token_id).long()
    assert mask.min() == 0
    found = prompts["input_ids"]
    output = model(**prompts, attention_mask=mask, use_cache=True)
    while True:
        new = output.logits[:, -1:].argmax(-1)
        found, mask = torch.cat([found, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
        if found.shape == expected.shape:
            break
        output = model(new, attention_mask=mask, past_key_values=output.past_key_values)
    assert torch.equal(found, expected)


def test_assistants_change_nothing(tiny_model, text_prompt, prompts):
    model = tiny_model()
    expected = model.generate(**text_prompt, **GREEDY)
    assert torch.equal(model.generate(**text_prompt, **GREEDY, assistant_model=tiny_model(num_layers=2)), expected)
    assert torch.equal(model.generate(**text_prompt, **GREEDY, prompt_lookup_num_tokens=2), expected)
    assert torch.equal(model.generate(**text_prompt, **GREEDY, assistant_early_exit=1), expected)
    assert torch.equal(model.generate(**text_prompt, **GREEDY), expected), "the draft left nothing behind"
    torch.manual_seed(0)
    sampled = model.generate(**text_prompt, do_sample=True, max_new_tokens=4, assistant_model=tiny_model())
    assert sampled.shape[0] == 1
    picture = {"input_ids": prompts["input_ids"][:1], "pixel_values": prompts["pixel_values"]}
    expected = model.generate(**picture, **GREEDY)
    assert torch.equal(model.generate(**picture, **GREEDY, prompt_lookup_num_tokens=2), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assistant_early_exit": 1}, "gives an assistant no pictures"),
        ({"guidance_scale": 2.0}, "M6TextToImagePipeline"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "no layer returns its attention weights"),
        ({"input_ids": None}, "a prompt is at least <bos>"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_what_cannot_work_says_so(tiny_model, prompts, options, message):
    with pytest.raises(UserError, match=message):
        tiny_model().generate(**{**prompts, **options}, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, "inputs_embeds: pictures, types and positions go by input_ids"),
        ({}, "go by input_ids"),
        ({"input_ids": torch.tensor([[1, 41]]), "output_attentions": True}, "output_attentions: no layer returns"),
    ],
    ids=["embeds", "nothing", "attentions"],
)
def test_what_a_call_cannot_take(tiny_model, options, message):
    with pytest.raises(UserError, match=message):
        tiny_model()(**options)
    if "input_ids" in options:
        with pytest.raises(UserError, match=message):
            tiny_model(output_attentions=True)(options["input_ids"])


def test_an_assistant_and_a_picture_say_so(tiny_model, prompts):
    with pytest.raises(UserError, match="gives an assistant no pictures"):
        tiny_model().generate(**prompts, max_new_tokens=2, assistant_model=tiny_model())


class Letters:
    """The parts of a tokenizer that a streamer asks for."""

    def decode(self, ids, **_):
        return "".join(f"{int(each)} " for each in ids)


def test_a_streamer_gets_every_token(tiny_model, text_prompt, capsys):
    generated = tiny_model().generate(**text_prompt, **GREEDY, streamer=TextStreamer(Letters(), skip_prompt=True))
    assert capsys.readouterr().out.split() == [str(each) for each in generated[0, 8:].tolist()]
