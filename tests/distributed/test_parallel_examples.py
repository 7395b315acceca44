"""The JSONs of configs/parallel: each switches its feature on, and runs on two processes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m6.config.run import RunConfig, parse_config
from m6.validation import read_document
from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import losses, train
from tests.fixtures.tiny_run import tiny_document

FOLDER = Path(__file__).parents[2] / "configs" / "parallel"
FEATURES: dict[str, Callable[[RunConfig], Any]] = {
    "any_world": lambda config: config.m6.training.deterministic == "any_world",
    "compression": lambda config: config.m6.communication.compresses,
    "delay": lambda config: config.m6.gradient_delay is not None,
    "elastic": lambda config: config.m6.elastic is not None,
    "expert_parallel": lambda config: config.m6.training.ep_size == 2,
    "offload": lambda config: config.expert_store is not None,
    "pipeline": lambda config: config.pipeline is not None,
    "slices": lambda config: config.pipeline.slices == 2,
    "tensor": lambda config: config.tensor is not None,
    "unequal_shares": lambda config: config.batch_split(2).shares(16) == (3, 1),
    "tensor_experts": lambda config: config.tensor is not None and config.m6.training.ep_size == 2,
}


def over_tiny_data(name: str, folder: Path) -> dict[str, Any]:
    """The JSON with the data of the tests, and with two steps."""
    document, tiny = read_document(FOLDER / f"{name}.json"), tiny_document(folder)["m6"]
    m6 = document["m6"]
    sizes = ("text_vocab_size", "image_vocab_size", "max_position_embeddings", "image_size", "patch_size")
    m6["model"] |= {size: tiny["model"][size] for size in sizes}
    m6 |= {section: tiny[section] for section in ("data", "evaluation", "checkpoint", "logging")}
    m6["training"]["total_steps"], m6["schedule"]["warmup_steps"] = 2, 1
    m6["evaluation"]["interval_steps"] = 2
    return document


def test_every_example_is_run_and_explained():
    assert {path.stem for path in FOLDER.glob("*.json")} == FEATURES.keys()
    page = (FOLDER / "README.md").read_text()
    assert [name for name in FEATURES if f"]({name}.json)" not in page] == []


@pytest.mark.parametrize("name", FEATURES)
def test_an_example_runs_on_two_processes(name: str, tmp_path: Path):
    document = over_tiny_data(name, tmp_path)
    assert FEATURES[name](parse_config(document))
    run_distributed(train, 2, document, str(tmp_path / "run"))
    found = losses(tmp_path / "run")
    assert len(found) > 2
    assert all(map(math.isfinite, found))
    assert (tmp_path / "run" / "DONE").exists()
