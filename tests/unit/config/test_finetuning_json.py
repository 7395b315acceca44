"""The JSON of a fine-tuning, which takes its model from a run, and what is refused in it."""

import json
from pathlib import Path

import pytest

from m6.architecture.settings import MODEL_TYPE
from m6.checkpoints.finetuning import load_finetuning_config
from m6.config.run import load_config
from m6.errors import UserError
from m6.shipped import CONFIGS
from tests.fixtures.command import user_error
from tests.fixtures.tiny_run import document_over


def test_the_json_of_a_fine_tuning_without_the_run_to_begin_with(tmp_path: Path):
    """Its model would be that of the defaults."""
    for arguments in (
        ["pretrain", "text_to_image", "--run-dir", tmp_path / "run"],
        ["plan", "text_to_image", "--cluster", "cpu_laptop"],
        ["submit", "text_to_image", "--job", "cpu_2x1", "--run-dir", tmp_path / "run", "--dry-run"],
    ):
        found = user_error(*arguments)
        assert "text_to_image: m6.model has no num_layers and no hidden_size" in found
        assert "give that by --init" in found


def test_a_pseudo_stage_of_a_fine_tuning_names_the_remedy():
    with pytest.raises(
        UserError,
        match=r"m6\.init .*; fine-tune with a JSON of configs/finetune, or leave m6\.pseudo_to_real",
    ):
        load_config(CONFIGS / "papers" / "m6_10t.json", ("m6.init=runs/base",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("m6.moe=null", "m6.moe is null, but"),
        ("m6.model=null", "m6.model is null, but"),
        ("m6.moe=true", "m6.moe: "),
        ("m6.moe=false", "m6.moe: "),
        ('m6.model="m6_cpu"', "m6.model: "),
    ],
)
def test_a_model_that_is_no_object(tmp_path: Path, override: str, message: str):
    (tmp_path / "config.json").write_text(json.dumps(document_over(tmp_path / "data", tmp_path / "tokenizer")))
    with pytest.raises(UserError, match=message):
        load_finetuning_config(CONFIGS / "finetune" / "image_captioning.json", tmp_path, (override,))


@pytest.mark.parametrize("moe", [5, "x", [1], True])
def test_an_exported_model_whose_section_is_no_object(tmp_path: Path, moe: object):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE, "hidden_size": 32, "moe": moe}))
    (tmp_path / "tune.json").write_text(json.dumps(document_over(tmp_path / "data", tmp_path / "tokenizer")))
    with pytest.raises(UserError, match=r"config\.json: moe is .*, expected an object"):
        load_finetuning_config(tmp_path / "tune.json", tmp_path)
