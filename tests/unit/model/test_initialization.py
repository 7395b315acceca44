"""Initial weights: functions of seed, name and expert alone."""

import copy
import math

import pytest
import torch

from m6.model import M6ForConditionalGeneration, initialize_parameters


def test_same_seed_same_weights_and_meta_models_too(tiny_config):
    config = tiny_config(moe={"num_experts": 4}, patch_encoder="resnet", image_size=64, patch_size=32)
    first = M6ForConditionalGeneration(config)
    initialize_parameters(first, seed=5)
    with torch.device("meta"):
        second = M6ForConditionalGeneration(config)
    second.to_empty(device="cpu")
    for tensor in (*second.parameters(), *second.buffers()):
        tensor.detach().fill_(3)
    initialize_parameters(second, seed=5)
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    initialize_parameters(second, seed=6)
    assert not torch.equal(first.model.layers[0].attention.qkv.weight, second.model.layers[0].attention.qkv.weight)
    initialize_parameters(second.model, seed=5)  # the stack alone has the same names
    assert torch.equal(first.model.layers[0].attention.qkv.weight, second.model.layers[0].attention.qkv.weight)
    half = copy.deepcopy(first).bfloat16()
    initialize_parameters(half, seed=5)
    assert torch.equal(half.model.embeddings.tokens.weight, first.model.embeddings.tokens.weight.bfloat16())


def test_a_local_slice_of_experts_has_the_values_of_the_whole(tiny_config):
    config = tiny_config(moe={"num_experts": 8})
    whole = M6ForConditionalGeneration(config)
    initialize_parameters(whole, seed=5)
    for first_expert, held in ((0, 2), (2, 4), (6, 2)):
        with torch.device("meta"):
            local = M6ForConditionalGeneration(config)
        for layer in local.model.layers:
            layer.ffn.experts.keep_local(first_expert, held, "group")  # what expert parallelism does
        local.to_empty(device="cpu")
        initialize_parameters(local, seed=5)
        expected = dict(whole.named_parameters())
        for name, parameter in local.named_parameters():
            value = expected[name]
            if ".experts." in name:
                value = value[first_expert : first_expert + held]
            assert torch.equal(parameter, value), name
    experts = whole.model.layers[0].ffn.experts.w_in
    assert not torch.equal(experts[0], experts[1])


def test_deviations(tiny_config):
    config = tiny_config(
        hidden_size=128,
        num_layers=4,
        ffn_hidden_size=256,
        initializer_range=0.02,
        moe={"num_experts": 4},
        moe_layer_frequency=2,
    )
    model = M6ForConditionalGeneration(config)
    initialize_parameters(model, seed=0)
    small = 0.02 / math.sqrt(8)
    expected = {
        "embeddings.tokens.weight": 0.02,
        "embeddings.patch_encoder.projection.weight": 0.02 * math.sqrt(128 / 192),
        "layers.0.attention.qkv.weight": 0.02,
        "layers.0.attention.output.weight": small,
        "layers.0.ffn.input.weight": 0.02,
        "layers.0.ffn.output.weight": small,
        "layers.1.ffn.experts.w_in": 0.02,
        "layers.1.ffn.experts.w_out": small,
    }
    for name, parameter in model.model.named_parameters():
        if name in expected:
            # At least 8192 draws: the sample deviation is within 5 %, more than 6 of its own deviations.
            assert parameter.std().item() == pytest.approx(expected[name], rel=0.05), name
        elif "norm.weight" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name


def test_construction_follows_the_global_seed_and_loading_draws_only_what_is_missing(tiny_config, tmp_path):
    config = tiny_config(moe={"num_experts": 4})

    def build(seed):
        torch.manual_seed(seed)
        return M6ForConditionalGeneration(config)

    assert torch.equal(build(1).model.layers[0].ffn.experts.w_out, build(1).model.layers[0].ffn.experts.w_out)
    assert not torch.equal(build(1).model.layers[0].ffn.router.weight, build(2).model.layers[0].ffn.router.weight)
    deviation = build(1).model.layers[0].attention.output.weight.std().item()
    assert deviation == pytest.approx(0.2 / 2, rel=0.1)  # 1024 draws of 0.2 / sqrt(2 * 2 layers)

    model = build(1)
    state = model.state_dict()
    del state["model.layers.0.attention.qkv.weight"], state["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    loaded = M6ForConditionalGeneration.from_pretrained(tmp_path)
    for name, value in state.items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert (loaded.model.norm.weight == 1).all()
    assert loaded.model.layers[0].attention.qkv.weight.std().item() == pytest.approx(0.2, rel=0.1)


def test_shared_layers_take_the_first_name(tiny_config):
    config = tiny_config()
    model, plain = M6ForConditionalGeneration(config), M6ForConditionalGeneration(config)
    model.model.layers[1] = model.model.layers[0]
    initialize_parameters(model, seed=3)
    initialize_parameters(plain, seed=3)
    assert torch.equal(model.model.layers[1].attention.qkv.weight, plain.model.layers[0].attention.qkv.weight)
