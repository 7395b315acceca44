"""The JSON of ``m6 train-image-tokenizer``."""

import re
from pathlib import Path

import pytest

from m6.config.image_tokenizer import load_settings
from m6.config.run import load_config
from m6.errors import UserError

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "configs" / "image_tokenizer" / "pictures_64.json"


@pytest.mark.parametrize("side", [64, 128])
def test_pictures_of_both_sizes_have_the_codes_of_the_same_model(side: int):
    tokenizer = load_settings(PICTURES.with_name(f"pictures_{side}.json")).model
    model = load_config(ROOT / "scripts" / "experiments" / "text_to_image" / "pretrain.json").model
    assert tokenizer.image_size == side
    assert (tokenizer.grid_size, tokenizer.num_codebooks) == (model.code_grid_size, model.codes_per_place)
    assert tokenizer.num_codebooks * tokenizer.codebook_size <= model.image_vocab_size


@pytest.mark.parametrize(("loss", "side"), [("perceptual", 16), ("adversarial", 8)])
def test_pictures_that_are_too_small_for_a_loss(loss: str, side: int):
    overrides = ("model.patch_size=1", "model.channels=[8]", f"loss.{loss}=1.0")
    load_settings(PICTURES, (*overrides, f"model.image_size={side}"))
    expected = f"loss.{loss} needs a model.image_size of at least {side}, found {side - 1}"
    with pytest.raises(UserError, match=expected):
        load_settings(PICTURES, (*overrides, f"model.image_size={side - 1}"))


def test_the_page_of_data_names_an_image_tokenizer_that_fits_the_base_model():
    page = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if "`finetune/text_to_image_base`" in line)
    [name] = re.findall(r"`m6 train-image-tokenizer (\S+) --out runs/image_tokenizer`", row)
    settings, run = load_settings(ROOT / name), load_config(ROOT / "configs" / "papers" / "m6t_base.json")
    assert settings.data.path == run.m6.data.path
    assert settings.model.num_codebooks * settings.model.codebook_size <= run.model.image_vocab_size
