"""M6Config: its checks, its id space, and parameter counts against built models and the papers' figures."""

import json

import pytest
import torch
from transformers import AutoConfig

from m6.architecture.names import NUM_SPECIAL_TOKENS, SPECIAL_TOKENS
from m6.architecture.settings import ModelSettings
from m6.errors import UserError
from m6.model import M6Config, M6ForConditionalGeneration, num_parameters

# name: (configuration, figure stated for it, unit of its last printed digit)
STATED = {
    "M6-T Base": ({"num_layers": 5, "moe": {"num_experts": 32}}, 1.4e9, 0.1e9),
    "M6-T 10B": ({"num_layers": 10, "moe": {"num_experts": 128}}, 10.8e9, 0.1e9),
    "M6-T 100B": ({"num_layers": 24, "moe": {"num_experts": 512}}, 103.2e9, 0.1e9),
    "M6-T 1T": ({"num_layers": 24, "ffn_hidden_size": 21248, "moe": {"num_experts": 960}}, 1002.7e9, 0.1e9),
    "M6-10T": (
        {"num_layers": 48, "ffn_hidden_size": 9984, "moe": {"num_experts": 10240, "num_prototypes": 80}},
        10.05e12,
        0.01e12,
    ),
    "M6-base": ({}, 327e6, None),
    "M6-10B": (
        {"num_layers": 50, "hidden_size": 4096, "num_attention_heads": 128, "ffn_hidden_size": 16384},
        10e9,
        None,
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_analytic_count_is_the_built_one_and_the_stated_figure(name):
    settings, stated, digit = STATED[name]
    config = M6Config(**settings)
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config)
    counts = num_parameters(config)
    assert counts["total"] == sum(parameter.numel() for parameter in model.parameters())
    if digit is None:
        # Stated for text alone: without image codes and with another patch encoder.
        assert counts["total"] == pytest.approx(stated, rel=0.06)
    else:
        # The papers' figures are those of the blocks' matrices, to the last printed digit; biases, embeddings
        # and the patch encoder add less than 0.1 % from 100B on.
        matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)
        assert abs(matrices - stated) <= digit / 2
        assert counts["total"] == pytest.approx(stated, rel=0.006)


def test_counts_by_part(tiny_config):
    config = tiny_config(moe={"num_experts": 4, "num_prototypes": 2}, moe_layer_frequency=2)
    expert = 2 * 32 * 48
    ffn = expert + 48 + 32
    assert num_parameters(config) == {
        "embeddings": (40 + 16 + 8 + 32 + 4 + 3) * 32,
        "patch_encoder": 3 * 8 * 8 * 32 + 32,
        "attention": 2 * (4 * 32 * 32 + 4 * 32),
        "ffn": ffn,
        "experts": 4 * expert,
        "router": 4 * 32,
        "norms": 5 * 2 * 32,
        "total": 103 * 32 + 6176 + 2 * 4224 + ffn + 4 * expert + 128 + 320,
        "active_per_token": 103 * 32 + 6176 + 2 * 4224 + ffn + 2 * expert + 128 + 320,
    }


def test_joint_id_space(tiny_config):
    config = tiny_config()
    assert len(SPECIAL_TOKENS) == NUM_SPECIAL_TOKENS == 16
    assert SPECIAL_TOKENS[:9] == (
        *("<pad>", "<bos>", "<eos>", "<mask>", "<image>", "<boi>", "<eoi>", "<sep>", "<code_mask>"),
    )
    ids = (config.pad_token_id, config.bos_token_id, config.eos_token_id, config.image_token_id)
    assert ids == (40, 41, 42, 44)
    assert (config.vocab_size, config.num_patches) == (64, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layer": 3}, '"num_layers"'),
        ({"hidden_size": 30}, "30 is not divisible by num_attention_heads 4"),
        ({"patch_size": 7}, "16 is not divisible by patch_size 7"),
        ({"codes_per_place": 3}, "image_vocab_size 8 is not divisible by codes_per_place 3"),
        ({"num_layers": "2"}, "num_layers must be a positive integer, found '2'"),
        ({"image_vocab_size": -1}, "found -1"),
        ({"code_grid_size": -1}, "code_grid_size must be an integer of at least 0, found -1"),
        ({"hidden_dropout": 1.0}, r"rate in \[0, 1\), found 1.0"),
        ({"initializer_range": 0}, "positive number, found 0"),
        ({"patch_encoder": "resnet50"}, '"resnet"'),
        ({"moe": {"num_expert": 4}}, '"num_experts"'),
        ({"moe": {"num_experts": 4, "num_prototypes": 3}}, "4.*3"),
        ({"moe": {"num_experts": 4}, "moe_layer_frequency": 3}, "3 exceeds num_layers 2"),
    ],
)
def test_mistakes_are_named(tiny_config, changes, message):
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)


def test_configuration_survives_a_file(tiny_config, tmp_path):
    config = tiny_config(moe={"num_experts": 4})
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is M6Config
    loaded.name_or_path = config.name_or_path
    assert loaded.to_dict() == config.to_dict()


def test_keys_of_other_tools_survive_a_file(tiny_config, tmp_path):
    config = tiny_config()
    config.unsloth_version = "1"
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "pad_token_id": 40, "hiden_size": 9}))
    with pytest.warns(UserWarning, match="has no field 'hiden_size'; did you mean \"hidden_size\"") as warned:
        loaded = AutoConfig.from_pretrained(tmp_path)
    assert len(warned) == 2
    loaded.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {**saved, "hiden_size": 9}
    assert AutoConfig.from_pretrained(tmp_path, use_cache=False).use_cache is False


def test_ids_take_their_own_value(tiny_config):
    config = tiny_config()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "image_token_id"):
        setattr(config, name, getattr(config, name))
        with pytest.raises(UserError, match=f"{name} is 3, expected {getattr(config, name)}: special tokens follow"):
            setattr(config, name, 3)


def test_plain_settings_make_the_same_model(tiny_config):
    """A run's settings are plain data; transformers' class has the same values and checks."""
    values = {"num_layers": 3, "hidden_size": 64, "codes_per_place": 2, "moe": {"num_experts": 4}}
    plain, config = ModelSettings(**values), M6Config(**values)
    assert M6Config.of(plain) == config
    assert M6Config.of(config) is config
    names = {name for name in vars(ModelSettings) if isinstance(getattr(ModelSettings, name), property)}
    assert {"vocab_size", "pad_token_id", "num_patches"} < names
    assert {name: getattr(plain, name) for name in names} == {name: getattr(config, name) for name in names}
    assert (plain.moe_config(), plain.is_moe_layer(1)) == (config.moe_config(), config.is_moe_layer(1))
    with torch.device("meta"):
        models = [M6ForConditionalGeneration(settings) for settings in (plain, config)]
    assert models[0].config == config
    assert models[1].config is config
    assert models[0].config.moe is not plain.moe, "a model may change its own configuration"
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in models]
    assert shapes[0] == shapes[1]
    with pytest.raises(UserError, match="num_layers must be a positive integer, found 0"):
        ModelSettings(num_layers=0)


@pytest.mark.parametrize(("frequency", "sparse"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2])])
def test_every_kth_layer_is_sparse(tiny_config, frequency, sparse):
    config = tiny_config(num_layers=4, moe={"num_experts": 4}, moe_layer_frequency=frequency)
    assert [layer for layer in range(4) if config.is_moe_layer(layer)] == sparse
    assert config.num_moe_layers == len(sparse)
