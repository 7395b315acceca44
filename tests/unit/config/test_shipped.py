"""Every shipped configuration parses, fits its number of ranks, and has the stated number of parameters."""

from pathlib import Path

import pytest
import torch

from m6.config.checks import check_world_size
from m6.config.run import load_config, parse_config
from m6.model import M6ForConditionalGeneration, num_parameters
from m6.validation import read_document

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
PAGES = (ROOT / "README.md", CONFIGS / "papers" / "README.md")

# name -> (ranks, parameters of the blocks' matrices, last printed digit); M6-T table 1, M6-10T section 4.
SHIPPED = {
    "m6_smoke": (1, 1.0e6, 0.1e6),
    "m6_cpu": (1, 13.2e6, 0.1e6),
    "m6_base": (8, 0.906e9, 0.001e9),
    "m6_10b": (16, 9.128e9, 0.001e9),
    "m6_100b": (64, 106.3e9, 0.1e9),
    "m6_1t": (512, 1116.7e9, 0.1e9),
    "m6t_base": (8, 1.4e9, 0.1e9),
    "m6t_10b": (16, 10.8e9, 0.1e9),
    "m6t_100b": (128, 103.2e9, 0.1e9),
    "m6t_1t": (480, 1002.7e9, 0.2e9),
    "m6_10t": (512, 10.05e12, 0.01e12),
}
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
# name -> (ranks, the configuration of the run it begins with)
FINETUNED = {
    "text_to_image": (1, "scripts/experiments/text_to_image/pretrain.json"),
    "text_to_image_base": (8, "configs/papers/m6t_base.json"),
    "text_to_image_small": (1, "configs/m6_smoke.json"),
    "image_captioning": (1, "configs/m6_cpu.json"),
    "text_classification": (1, "configs/m6_cpu.json"),
    "image_text_matching": (1, "configs/m6_cpu.json"),
    "visual_question_answering": (1, "configs/m6_cpu.json"),
    "text_continuation": (1, "configs/m6_cpu.json"),
}


def test_every_configuration_is_listed():
    assert {path.stem for folder in (".", "papers") for path in (CONFIGS / folder).glob("*.json")} == set(SHIPPED)
    assert {path.stem for path in (CONFIGS / "finetune").glob("*.json")} == set(FINETUNED)


@pytest.mark.parametrize("name", FINETUNED)
def test_finetuning_configuration(name: str):
    ranks, pretrained = FINETUNED[name]
    document, before = read_document(CONFIGS / "finetune" / f"{name}.json"), read_document(ROOT / pretrained)["m6"]
    own = {section: document["m6"].pop(section, {}) for section in ("model", "moe")}
    assert own["model"].keys() <= {"hidden_dropout", "attention_dropout"}, "else the model is that of the run before"
    assert not own["moe"]
    document["m6"] |= {key: before[key] | own[key] for key in ("model", "moe")}
    check_world_size(parse_config(document), ranks)


def stated_in_readme(name: str) -> list[str]:
    """All parameters and those that compute a token, such as "5.40 M", of the README's table of sizes."""
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    [row] = [line for line in lines if line.startswith(f"| [{name}]")]
    return [cell.strip() for cell in row.split("|")[2:4]]


@pytest.mark.parametrize("name", SHIPPED)
def test_configuration(name: str):
    ranks, parameters, digit = SHIPPED[name]
    config = load_config(Path(name))
    check_world_size(config, ranks)
    counts = num_parameters(config.model, experts_per_token=config.expected_routing.experts_per_token)
    matrices = counts["attention"] + counts["ffn"] + counts["experts"] + counts["router"]
    assert abs(matrices - parameters) <= digit / 2, matrices
    for count, stated in zip((counts["total"], counts["active_per_token"]), stated_in_readme(name), strict=True):
        number, unit = stated.split()
        assert f"{count / UNITS[unit]:,.{len(number.partition('.')[2])}f}" == number
    with torch.device("meta"):
        model = M6ForConditionalGeneration(config.model)
    assert sum(parameter.numel() for parameter in model.parameters()) == counts["total"]
