"""Experts on the attention projections: the same attention, routed; caches, counts, initial weights, training."""

import math

import pytest
import torch
from transformers import StaticCache
from transformers.cache_utils import DynamicCache

from m6.errors import UserError
from m6.model import M6ForConditionalGeneration, initialize_parameters, num_parameters

MOE = {"num_experts": 4, "num_prototypes": 2, "aux_loss_weight": 0.1}


@pytest.fixture
def model(tiny_model):
    """Sparse in its second layer, attention included."""
    return tiny_model(moe=MOE, moe_attention=True)


def routed(projection, token):
    """The routed projection of one token [D], expert by expert."""
    prototypes = projection.router.weight.unflatten(0, (2, 2))
    output = 0
    for z, router in enumerate(prototypes):
        p = (router @ token).softmax(0)
        chosen = int(p.argmax())
        output = output + p[chosen] * (projection.experts.weight[2 * z + chosen] @ token)
    return output


def test_attention_equals_a_loop_over_tokens_and_heads(model):
    attention = model.model.layers[1].attention
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 5) < 0.5
    mask |= torch.eye(5, dtype=torch.bool)
    output = attention(x, mask, torch.ones(2, 5, dtype=torch.bool), None, 1)
    heads, width = 4, 8
    for b in range(2):
        qkv = [routed(attention.qkv, token).view(3, heads, width) for token in x[b]]
        for i in range(5):
            seen = [j for j in range(5) if mask[b, 0, i, j]]
            attended = []
            for h in range(heads):
                scores = torch.stack([qkv[i][0, h] @ qkv[j][1, h] / math.sqrt(width) for j in seen])
                attended.append(sum(p * qkv[j][2, h] for p, j in zip(scores.softmax(0), seen, strict=True)))
            expected = routed(attention.output, torch.cat(attended))
            torch.testing.assert_close(output.hidden_states[b, i], expected, atol=1e-12, rtol=1e-9)
    assert [stats.num_tokens.item() for stats in output.stats] == [10, 10]


@pytest.mark.parametrize("static", [False, True])
def test_cached_logits_equal_uncached(model, pack, samples, static):
    batch = pack(model.config, [samples[:1], samples[3:]], left=2)
    mask = (batch["sample_ids"] != 0).long()
    names = ("input_ids", "token_type_ids", "position_ids")
    length = mask.shape[1]
    with torch.no_grad():
        whole = model(**{name: batch[name] for name in names}, attention_mask=mask, pixel_values=batch["pixel_values"])
        cache = StaticCache(model.config, max_cache_len=length + 3) if static else DynamicCache()
        logits = []
        for start, end in [(0, 10), *((i, i + 1) for i in range(10, length))]:  # the prefix is within the first 10
            part = {name: batch[name][:, start:end] for name in names}
            pixels = batch["pixel_values"] if start == 0 else None
            step = model(**part, attention_mask=mask[:, :end], pixel_values=pixels, past_key_values=cache)
            logits.append(step.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole.logits, atol=1e-5, rtol=1e-5)


def test_generation_with_a_cache_is_generation_without(model):
    bos, pad = model.config.bos_token_id, model.config.pad_token_id
    prompts = torch.tensor([[1, 2, 3, bos, 4], [pad, pad, pad, bos, 5]])
    options = {"max_new_tokens": 8, "do_sample": False}
    cached = model.generate(prompts, **options)
    assert torch.equal(cached, model.generate(prompts, use_cache=False, **options))
    alone = model.generate(prompts[1:, 3:], **options)[0].tolist()
    assert cached[1].tolist()[3 : 3 + len(alone)] == alone


def test_padding_never_matters(model, pack, samples):
    plain = pack(model.config, [samples[:2]])
    padded = pack(model.config, [samples[:2]], length=40, left=3)
    length = plain["input_ids"].shape[1]
    inputs = ("input_ids", "token_type_ids", "position_ids", "sample_ids", "pixel_values")
    with torch.no_grad():
        expected = model(**{name: plain[name] for name in inputs})
        found = model(**{name: padded[name] for name in inputs})
    torch.testing.assert_close(found.logits[:, 3 : 3 + length], expected.logits, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss, atol=1e-6, rtol=0)


def test_losses_and_statistics_of_every_router(model, pack, samples):
    batch = pack(model.config, [samples])
    output = model(**batch)
    assert len(output.router_stats) == 3  # one sparse layer: query/key/value, output, feed-forward
    # A prototype's balancing loss is about 1: three routers, weight 0.1.
    assert output.aux_loss.item() == pytest.approx(0.3, rel=0.5)
    output.aux_loss.backward(retain_graph=True)
    routers = [name for name, p in model.named_parameters() if "router" in name and p.grad is not None and p.grad.any()]
    assert len(routers) == 3


def test_activation_checkpointing_changes_nothing(model, pack, samples):
    batch = pack(model.config, [samples])
    model.train()
    gradients = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        model(**batch).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("frequency", [1, 2])
def test_count_is_the_built_one(tiny_config, frequency):
    config = tiny_config(moe=MOE, moe_attention=True, moe_layer_frequency=frequency, num_layers=4)
    model = M6ForConditionalGeneration(config)
    counts = num_parameters(config)
    parameters = dict(model.named_parameters())
    assert counts["total"] == sum(parameter.numel() for parameter in parameters.values())
    experts = sum(parameter.numel() for name, parameter in parameters.items() if ".experts." in name)
    assert counts["experts"] == experts
    assert counts["active_per_token"] == counts["total"] - experts // 2  # 2 of 4 experts


def test_initial_weights_follow_the_expert_number(tiny_config):
    config = tiny_config(moe={"num_experts": 8}, moe_attention=True, hidden_size=64, initializer_range=0.02)
    whole, local = M6ForConditionalGeneration(config), M6ForConditionalGeneration(config)
    initialize_parameters(whole, seed=5)
    projections = [layer.attention.qkv for layer in local.model.layers]
    projections += [layer.attention.output for layer in local.model.layers]
    for projection in projections:
        projection.experts.keep_local(2, 4, "group")
    initialize_parameters(local, seed=5)
    parameters = dict(whole.named_parameters())
    for name, parameter in local.named_parameters():
        cut = "attention" in name and ".experts." in name
        assert torch.equal(parameter, parameters[name][2:6] if cut else parameters[name]), name
    attention = whole.model.layers[0].attention
    # 32,768 draws at least: the sample deviation is within 3 %, more than 7 of its own deviations.
    assert attention.qkv.experts.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert attention.output.experts.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.03)


def test_save_and_load(model, pack, samples, tmp_path):
    model = model.float()
    batch = pack(model.config, [samples])
    model.save_pretrained(tmp_path)
    loaded = M6ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"moe_attention": True}, "model is dense"), ({"moe_attention": 1, "moe": MOE}, "true or false, found 1")],
)
def test_mistakes_are_named(tiny_config, changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)
