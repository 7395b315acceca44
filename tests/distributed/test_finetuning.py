"""A run that learns to draw from another's weights, on one and on two ranks: losses and pictures are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from m6.checkpoints.format import WEIGHT
from m6.checkpoints.loading import open_newest_checkpoint
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


@pytest.mark.parametrize(("stage", "ep_size"), [pytest.param(0, 2, marks=pytest.mark.nightly), (2, 2), (3, 1)])
def test_finetuning_does_not_depend_on_the_layout(folder: Path, stage: int, ep_size: int):
    root = folder / f"run_{stage}_{ep_size}"
    run_distributed(train, 2, document(folder, 2, stage, ep_size), str(root))
    assert losses(root) == pytest.approx(losses(folder / "reference"), rel=TOLERANCE)
    pictures = [Image.open(run / "samples" / "step_00000004.png").tobytes() for run in (root, folder / "reference")]
    assert pictures[0] == pictures[1]


@pytest.mark.parametrize(
    "delay", [None, pytest.param({"accept_loss": True}, marks=pytest.mark.nightly)], ids=["at once", "one step late"]
)
def test_adapters_do_not_depend_on_the_layout(folder: Path, delay: dict[str, Any] | None):
    pytest.importorskip("peft")
    merged, name = [], "adapted" if delay is None else "adapted_late"
    for ranks, stage, ep_size in ((1, 0, 1), (2, 2, 2)):
        made = document(folder, ranks, stage, ep_size)
        made["m6"]["lora"] = {"rank": 2, "targets": ["attention", "experts"]}
        made["m6"]["gradient_delay"] = delay
        run_distributed(train, ranks, made, str(folder / f"{name}_{ranks}"))
        reader = open_newest_checkpoint(folder / f"{name}_{ranks}")
        merged.append({name: reader.read(name, WEIGHT) for name in reader.names(WEIGHT)})
    assert losses(folder / f"{name}_2") == pytest.approx(losses(folder / f"{name}_1"), rel=TOLERANCE)
    assert merged[0].keys() == merged[1].keys()
    for name, weight in merged[0].items():
        torch.testing.assert_close(merged[1][name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("parallel", "delay"),
    [
        pytest.param({"pipeline": {"num_ranks": 2}}, None, marks=pytest.mark.nightly),
        ({"pipeline": {"num_ranks": 2, "schedule": "zbv"}}, None),
        pytest.param({"pipeline": {"num_ranks": 2, "slices": 3}}, None, marks=pytest.mark.nightly),
        ({"pipeline": {"num_ranks": 2}}, {"accept_loss": True}),
    ],
    ids=["1f1b", "zbv", "slices", "one step late"],
)
def test_adapters_of_parts_are_those_of_the_whole_model(
    folder: Path, parallel: dict[str, Any], delay: dict[str, Any] | None
):
    """The token embedding, of which the last stage has a copy, is frozen."""
    pytest.importorskip("peft")
    found = []
    for ranks in (1, 2):
        # Slices have dropout of their own.
        made = layout(
            folder, ranks, 1, 1, m6__model__num_layers=4, m6__gradient_delay=delay, m6__model__hidden_dropout=0.0
        )
        made["m6"] |= {"init": str(folder / "deep"), "lora": {"rank": 2, "targets": ["experts"]}}
        if not (folder / "deep").exists():
            run_distributed(train, 1, layout(folder, 1, 0, 1, m6__model__num_layers=4), str(folder / "deep"))
        made["m6"]["parallel"] = parallel if ranks == 2 else {}
        root = folder / f"parts {parallel} {ranks} {delay}"
        run_distributed(train, ranks, made, str(root))
        reader = open_newest_checkpoint(root)
        found.append({name: reader.read(name, WEIGHT) for name in reader.names(WEIGHT)})
        if ranks == 2:
            assert losses(root) == pytest.approx(losses(folder / f"parts {parallel} 1 {delay}"), rel=TOLERANCE)
    assert found[0].keys() == found[1].keys()
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-5)
