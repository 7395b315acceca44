"""The JSON of ``m6 train-image-tokenizer``."""

from pathlib import Path

import pytest

from m6.config.image_tokenizer import load_settings
from m6.errors import UserError

PICTURES = Path(__file__).parents[3] / "configs" / "image_tokenizer" / "pictures_64.json"


@pytest.mark.parametrize(("loss", "side"), [("perceptual", 16), ("adversarial", 8)])
def test_pictures_that_are_too_small_for_a_loss(loss: str, side: int):
    overrides = ("model.patch_size=1", "model.channels=[8]", f"loss.{loss}=1.0")
    load_settings(PICTURES, (*overrides, f"model.image_size={side}"))
    expected = f"loss.{loss} needs a model.image_size of at least {side}, found {side - 1}"
    with pytest.raises(UserError, match=expected):
        load_settings(PICTURES, (*overrides, f"model.image_size={side - 1}"))
