"""A run whose batch grows: the same on any number of ranks and ZeRO stage, and resumed to the bit inside the ramp."""

import json
from pathlib import Path
from typing import Any

import pytest

from m6.checkpoints.comparison import compare, open_step
from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import TOLERANCE, layout, losses, noise, norms, train

CHANGES: dict[str, Any] = {
    "train_batch_size": 16,
    "m6__training__batch_ramp": [{"steps": 2, "batch_size": 4}, {"steps": 1, "batch_size": 8}],
    "m6__training__total_steps": 5,
}


def trained(folder: Path, name: str, attempts: list[tuple[int, int, int | None]], **changes: Any) -> Path:
    for ranks, stage, stop_at in attempts:
        document = layout(folder, ranks, stage, 1, **{**CHANGES, **changes})
        run_distributed(train, ranks, document, str(folder / name), stop_at)
    return folder / name


def samples(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["samples_seen"] for line in lines if "samples_seen" in line]


def test_a_batch_that_grows(tmp_path: Path):
    alone = trained(tmp_path, "alone", [(1, 0, None)])
    # Rows are packed, so that a row of a batch may have several samples.
    seen = samples(alone)
    steps = [later - earlier for earlier, later in zip([0, *seen], seen, strict=False)]
    assert min(steps[:2]) >= 4
    assert steps[2] >= 8
    assert min(steps[3:]) >= 16
    resumed = trained(tmp_path, "resumed", [(1, 0, 1), (1, 0, 3), (1, 0, None)])
    assert compare(*open_step((resumed, alone), None)).differences == []
    assert losses(resumed) == losses(alone)
    wandering = trained(tmp_path, "wandering", [(2, 2, 1), (2, 1, 4), (1, 0, None)])
    assert losses(wandering) == pytest.approx(losses(alone), rel=TOLERANCE)
    assert norms(wandering) == pytest.approx(norms(alone), rel=10 * TOLERANCE)
    assert noise(wandering) == pytest.approx(noise(alone), rel=100 * TOLERANCE)
    assert samples(wandering) == seen


@pytest.mark.slow
def test_with_compressed_gradients(tmp_path: Path):
    whole = {"m6__communication": {"gradients": "top_k", "density": 1.0}}
    plain, run = trained(tmp_path, "plain", [(2, 1, None)]), trained(tmp_path, "whole", [(2, 1, None)], **whole)
    assert losses(run) == losses(plain)
