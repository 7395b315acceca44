"""A run that learns to draw from another's weights, on one and on two ranks: losses and pictures are the same."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import TOLERANCE, layout, losses, train
from tests.fixtures.tiny_data import build_tiny_codes

pytestmark = pytest.mark.slow


def document(folder: Path, ranks: int, stage: int, ep_size: int) -> dict[str, Any]:
    made = layout(folder, ranks, stage, ep_size)
    made["m6"]["init"] = str(folder / "pretrained")
    made["m6"]["data"]["image_tokenizer"] = str(folder / "image_tokenizer")
    made["m6"]["objectives"] = {"text_to_image": {"weight": 1.0}, "text_denoising": {"weight": 0.5}}
    made["m6"]["samples"] = {"interval_steps": 4, "captions": ["红色圆形", "蓝色方块"], "num_images": 3}
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data, its codes, a pretrained run, and a run on one rank that began with it."""
    folder = tmp_path_factory.mktemp("finetuning")
    run_distributed(train, 2, layout(folder, 2, 2, 2), str(folder / "pretrained"))
    build_tiny_codes(folder / "data", folder / "image_tokenizer")
    run_distributed(train, 1, document(folder, 1, 0, 1), str(folder / "reference"))
    return folder


@pytest.mark.parametrize(("stage", "ep_size"), [(0, 2), (2, 2), (3, 1)])
def test_finetuning_does_not_depend_on_the_layout(folder: Path, stage: int, ep_size: int):
    root = folder / f"run_{stage}_{ep_size}"
    run_distributed(train, 2, document(folder, 2, stage, ep_size), str(root))
    assert losses(root) == pytest.approx(losses(folder / "reference"), rel=TOLERANCE)
    pictures = [Image.open(run / "samples" / "step_00000004.png").tobytes() for run in (root, folder / "reference")]
    assert pictures[0] == pictures[1]
