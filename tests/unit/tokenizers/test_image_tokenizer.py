import json
import shutil

import pytest
import torch

from m6.errors import StorageError, UserError
from m6.tokenizers.image import ImageTokenizerConfig, M6ImageTokenizer, load_image_tokenizer
from tests.fixtures.storage import lose

TINY = ImageTokenizerConfig(image_size=16, patch_size=2, channels=[8, 16], codebook_size=12, codebook_dim=4)


@pytest.fixture
def tokenizer():
    torch.manual_seed(0)
    return M6ImageTokenizer(TINY).eval()


@pytest.fixture
def pixels():
    return torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def tiny_vq_model(**changes):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    settings = {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "sample_size": 16,
        "num_vq_embeddings": 32,
        "norm_num_groups": 4,
    }
    return diffusers.VQModel(**settings | changes).eval()


def test_codes_are_the_nearest_of_the_codebook(tokenizer, pixels):
    codes = tokenizer.encode(pixels)
    assert codes.dtype == torch.int64
    assert codes.shape == (3, tokenizer.num_codes) == (3, 16)
    features = tokenizer.encoder(2 * pixels - 1).double().permute(0, 2, 3, 1).flatten(1, 2)
    book = tokenizer.quantizer.codebook.double()
    for picture, row in zip(features, codes, strict=True):
        for feature, code in zip(picture, row, strict=True):
            # The codebook has unit length, so the nearest code is the one of the largest cosine.
            assert code == torch.nn.functional.cosine_similarity(feature[None], book).argmax()


def test_decoding_the_codes_is_the_reconstruction(tokenizer, pixels):
    reconstruction = tokenizer(pixels)
    assert torch.equal(reconstruction.codes, tokenizer.encode(pixels))
    decoded = tokenizer.decode(reconstruction.codes)
    assert decoded.shape == pixels.shape
    # The same decoder on the same vectors; only their layout in memory may differ.
    torch.testing.assert_close(decoded, reconstruction.pixels.detach().clamp(0, 1), atol=1e-6, rtol=0)


def test_each_codebook_codes_its_own_part_of_a_feature(pixels, tmp_path):
    torch.manual_seed(0)
    tokenizer = M6ImageTokenizer(TINY.model_copy(update={"num_codebooks": 3})).eval()
    codes = tokenizer.encode(pixels)
    assert codes.shape == (3, tokenizer.num_codes) == (3, 48)
    assert (tokenizer.codebook_size, tokenizer.codes_per_place) == (36, 3)
    assert (codes // 12 == torch.arange(48) % 3).all()
    features = tokenizer.encoder(2 * pixels - 1).double().permute(0, 2, 3, 1).flatten(1, 2)
    books = tokenizer.quantizer.codebook.double()  # [3, 12, 4]
    for picture, row in zip(features, codes.view(3, 16, 3), strict=True):
        for feature, place in zip(picture, row.tolist(), strict=True):
            for number, code in enumerate(place):
                part = feature[4 * number : 4 * number + 4]
                similarity = torch.nn.functional.cosine_similarity(part[None], books[number])
                assert code - 12 * number == similarity.argmax()
    reconstruction = tokenizer(pixels)
    assert torch.equal(reconstruction.codes, codes)
    torch.testing.assert_close(tokenizer.decode(codes), reconstruction.pixels.detach().clamp(0, 1), atol=1e-6, rtol=0)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_image_tokenizer(tmp_path)
    assert torch.equal(loaded.encode(pixels), codes)
    assert loaded.checksum == tokenizer.checksum


def test_the_checksum_of_a_single_codebook_is_that_of_before_there_were_more(tokenizer):
    assert "num_codebooks" not in tokenizer.config_document()


def test_the_grid_is_decoded_row_by_row(tokenizer):
    seen = []
    tokenizer.decoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokenizer.decode(torch.arange(16)[None] % 12)
    assert torch.equal(seen[0][0, :, 1, 2], tokenizer.quantizer.codebook[6])


def test_a_code_depends_on_its_own_pixels_alone(tokenizer, pixels):
    changed = pixels.clone()
    changed[:, :, 4:8, 8:12] = 1 - changed[:, :, 4:8, 8:12]  # the pixels of the code in row 1, column 2
    different = (tokenizer.encoder(2 * pixels - 1) != tokenizer.encoder(2 * changed - 1)).any(dim=1)
    assert different[:, 1, 2].all()
    assert different.sum() == len(pixels)


def test_saving_and_loading_keeps_codes_and_checksum(tokenizer, pixels, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_image_tokenizer(tmp_path)
    assert isinstance(loaded, M6ImageTokenizer)
    assert not loaded.training
    assert loaded.checksum == tokenizer.checksum
    assert torch.equal(loaded.encode(pixels), tokenizer.encode(pixels))
    assert (loaded.image_size, loaded.codebook_size, loaded.num_codes) == (16, 12, 16)


def test_a_misspelt_folder_is_not_looked_up_on_the_hub(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer.save_pretrained("runs/image_tokenizer")
    with pytest.raises(UserError, match=r'^runs/image_tokeniser: no such folder; did you mean "image_tokenizer"\?$'):
        load_image_tokenizer("runs/image_tokeniser")
    shutil.rmtree("runs/image_tokenizer")
    with pytest.raises(UserError, match=r"^runs/image_tokenizer: no such folder; runs holds no image tokenizer$"):
        load_image_tokenizer("runs/image_tokenizer")


def test_the_checksum_depends_on_every_weight_and_the_configuration(tokenizer):
    before = tokenizer.checksum
    assert before == tokenizer.checksum
    with torch.no_grad():
        tokenizer.decoder[0].bias[0] += 1e-3
    assert tokenizer.checksum != before
    other = M6ImageTokenizer(TINY.model_copy(update={"commitment_weight": 0.5}))
    other.load_state_dict(tokenizer.state_dict())
    assert other.checksum != tokenizer.checksum


def test_training_moves_the_codebook_and_encoding_does_not(tokenizer, pixels):
    tokenizer.train()
    before = tokenizer.quantizer.codebook.clone()
    tokenizer.encode(pixels)
    assert torch.equal(tokenizer.quantizer.codebook, before)
    tokenizer(pixels)
    assert not torch.equal(tokenizer.quantizer.codebook, before)


def test_wrong_shapes_and_codes_are_refused(tokenizer):
    with pytest.raises(ValueError, match=r"expected \[B, 3, 16, 16\], found \[1, 3, 8, 8\]"):
        tokenizer.encode(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"expected \[B, 16\], found \[1, 9\]"):
        tokenizer.decode(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expected \[0, 12\), found 0 to 12"):
        tokenizer.decode(torch.arange(16)[None].clamp(max=12))


def test_configurations_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="image_size 20 is not a multiple of 8"):
        ImageTokenizerConfig(image_size=20, patch_size=2, channels=[8, 8, 8])


def test_a_vq_model_of_diffusers_is_a_tokenizer(pixels, tmp_path):
    model = tiny_vq_model()
    model.save_pretrained(tmp_path / "vq")
    loaded = load_image_tokenizer(tmp_path / "vq")
    assert (loaded.image_size, loaded.codebook_size, loaded.num_codes) == (16, 32, 64)
    codes = loaded.encode(pixels)
    assert codes.shape == (3, 64)
    assert codes.dtype == torch.int64
    with torch.no_grad():
        expected = ((model(2 * pixels - 1).sample + 1) / 2).clamp(0, 1)
    # The same network; the model itself adds and subtracts the features around the codes.
    torch.testing.assert_close(loaded.decode(codes), expected, atol=1e-5, rtol=0)
    loaded.save_pretrained(tmp_path / "again")
    again = load_image_tokenizer(tmp_path / "again")
    assert again.checksum == loaded.checksum
    assert torch.equal(again.encode(pixels), codes)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "holds no image tokenizer"),
        ("{", "not readable as JSON"),
        ("[]", "no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ({"model_type": "m6"}, 'found "m6"'),
        ({"model_type": "m6_image_tokenizer", "chanels": [8]}, 'did you mean "channels"'),
        ({"model_type": "m6_image_tokenizer", "image_size": 66}, "not a multiple of 4"),
        ({"model_type": "m6_image_tokenizer"}, "not a whole image tokenizer"),
        ({"_class_name": "VQModel"}, "not a VQModel"),
    ],
)
def test_a_folder_that_is_no_tokenizer_is_named(tmp_path, document, message):
    if document is not None:
        (tmp_path / "config.json").write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UserError, match=message) as caught:
        load_image_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_damaged_or_foreign_weights_are_named(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(UserError, match="not a whole image tokenizer"):
        load_image_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(weights)
    config = json.loads((tmp_path / "config.json").read_text()) | {"channels": [8, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="not a whole image tokenizer"):
        load_image_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_lost_file_server_is_not_a_damaged_tokenizer(tokenizer, tmp_path, monkeypatch, name):
    tokenizer.save_pretrained(tmp_path)
    lose(monkeypatch, name)
    with pytest.raises(StorageError, match=rf"{name} cannot be read"):
        M6ImageTokenizer.from_pretrained(tmp_path)


def test_a_name_that_is_neither_a_folder_nor_of_the_hub():
    with pytest.raises(UserError, match="holds no image tokenizer"):
        load_image_tokenizer("no_such_folder")
