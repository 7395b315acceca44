"""The model that the repository holds: it loads, draws what captions say, and can be trained further."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForImageTextToText, AutoProcessor

from m6.checkpoints.initial import open_initial_weights
from m6.checkpoints.loading import load_run_model
from m6.data.sources.shapes import COLOURS, PLACES, RELATIONS, SHAPES, SIZES
from m6.generation.pipeline import M6TextToImagePipeline
from m6.generation.sampling import Sampling
from m6.model import num_parameters
from m6.tokenizers.processor import M6Processor

MODEL = Path(__file__).resolve().parents[3] / "models" / "text_to_image"


@pytest.fixture(scope="module")
def pipeline() -> M6TextToImagePipeline:
    return M6TextToImagePipeline.from_pretrained(MODEL)


def test_it_says_what_it_has_learned(pipeline):
    assert pipeline.model.decodings == ["masked", "left_to_right"]
    assert sorted(pipeline.model.learned_objectives) == ["image_captioning", "image_code_denoising", "text_to_image"]


@pytest.mark.parametrize("decoding", ["masked", "left_to_right"])
def test_it_draws_colours_that_captions_name(pipeline, decoding):
    """Also of two combinations that training left out: 红色的圆形 and 棕色的五角星."""
    captions = ["红色的圆形", "棕色的五角星", "蓝色的正方形", "绿色的心形", "黄色的长方形"]
    images = pipeline(captions, sampling=Sampling(decoding=decoding), progress=False).images
    for caption, image in zip(captions, images, strict=True):
        pixels = np.asarray(image, np.float64).reshape(-1, 3)
        shape = pixels[pixels.min(axis=1) < 200]  # what is not the white background
        assert 0.02 < len(shape) / len(pixels) < 0.7, caption
        distance = {name: np.linalg.norm(np.median(shape, axis=0) - rgb) for name, rgb in COLOURS.items()}
        assert min(distance, key=distance.__getitem__) == caption.split("的")[0], caption


def test_it_warns_of_captions_of_which_it_knows_nothing(pipeline):
    new = {
        "狗": "狗",
        "狗的脸": "狗",
        "猫": "猫 as the first character",
        "巴西国旗": "国 after 西 (seen: 的)",
        "红色的圆形和蓝色的正方形": "和 after 形",
        "白色的圆形": "色 after 白",
        "a blue circle": "a, a space, b, l",
        "a red heart": "a, a space, r, e",
    }
    for caption, found in new.items():
        (warning,) = pipeline.caption_warnings(caption)
        assert f"has what no training caption has: {found}" in warning


def test_it_does_not_warn_of_new_combinations_of_known_words(pipeline):
    """It draws them well: all colours and shapes, of which it has seen 54 of 66 pairs, and the source's templates."""
    alone = [f"{colour}的{shape}" for colour in COLOURS for shape in SHAPES]
    pairs = [f"{one}在{other}的{where}" for one, other, where in itertools.product(alone[::5], alone[::7], RELATIONS)]
    sized = [f"{colour}的{size}{shape}" for colour, size, shape in itertools.product(COLOURS, SIZES, SHAPES)]
    placed = [f"{place}的{one}" for place, one in itertools.product(PLACES, alone)]
    emoji = ["购物车", "鬼", "巴西的旗帜", "购物车，立体风格", "蓝色的鬼，剪影风格"]
    for caption in [*alone, *pairs, *sized, *placed, *emoji]:
        assert pipeline.caption_warnings(caption) == [], caption


def test_its_card_names_the_data_and_the_size(pipeline):
    card = ModelCard.load(MODEL / "README.md")
    assert card.data.language == "zh"
    assert f"{num_parameters(pipeline.model.config)['total']:,} parameters" in card.text
    for licence in ("CC-BY-SA-4.0", "CC-BY-4.0", "MIT", "Unicode-3.0"):
        assert licence in card.text.partition("## Licence")[2]
    assert re.search(r"\| image_code_denoising \| \d\.\d+ \|", card.text)


def test_nothing_of_it_names_python_files_which_it_does_not_have():
    assert not list(MODEL.rglob("*.py"))
    for file in MODEL.glob("*.json"):
        assert "auto_map" not in file.read_text(encoding="utf-8"), file.name
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    assert "trust_remote_code" not in card
    assert "import m6.model" in card


def test_transformers_loads_it_after_m6(pipeline):
    assert isinstance(AutoProcessor.from_pretrained(MODEL), M6Processor)
    assert isinstance(AutoModelForImageTextToText.from_pretrained(MODEL), type(pipeline.model))


def test_a_run_can_start_from_its_weights():
    weights = open_initial_weights(MODEL)
    model, _ = load_run_model(MODEL, torch.device("cpu"))
    assert {name for name, _ in weights.shapes} == {name for name, _ in model.named_parameters()}
    name, parameter = next(iter(model.named_parameters()))
    row = torch.empty(parameter.shape[-1])
    weights.read_into(name, "weight", 0, row)
    assert torch.equal(row, parameter.detach()[0].float())
