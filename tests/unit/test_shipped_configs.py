"""Every shipped configuration parses, fits its number of ranks, and has the stated number of parameters."""

import shutil
from pathlib import Path

import pytest
import torch

from m6.config import check_world_size, load_config
from m6.model import M6ForConditionalGeneration, num_parameters
from m6.training.initial_weights import load_finetuning_config

CONFIGS = Path(__file__).parents[2] / "configs"

# name -> (ranks, parameters of the blocks' matrices, last printed digit); M6-T table 1, M6-10T section 4.
SHIPPED = {
    "m6_smoke": (1, 4.5e6, 0.1e6),
    "m6_cpu": (1, 13.2e6, 0.1e6),
    "m6_base": (8, 1.4e9, 0.1e9),
    "m6_10b": (16, 10.8e9, 0.1e9),
    "m6_100b": (128, 103.2e9, 0.1e9),
    "m6_1t": (480, 1002.7e9, 0.2e9),
    "m6_10t": (512, 10.05e12, 0.01e12),
}


def test_every_configuration_is_listed():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_configuration(name: str):
    ranks, parameters, digit = SHIPPED[name]
    config = load_config(CONFIGS / f"{name}.json")
    assert check_world_size(config, ranks) >= 1
    counts = num_parameters(config.model)
    matrices = counts["attention"] + counts["ffn"] + counts["experts"] + counts["router"]
    assert abs(matrices - parameters) <= digit / 2, matrices
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == counts["total"]


@pytest.mark.parametrize("path", sorted((CONFIGS / "finetune").glob("*.json")), ids=lambda path: path.stem)
def test_finetuning_configuration(path: Path, tmp_path: Path):
    shutil.copy(CONFIGS / "m6_cpu.json", tmp_path / "config.json")
    config = load_finetuning_config(path, tmp_path)
    assert check_world_size(config, 8 if path.stem.endswith("_base") else 1) >= 1
    assert config.m6.init == tmp_path
