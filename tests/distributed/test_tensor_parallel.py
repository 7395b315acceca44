"""Matrices divided over ranks: runs report and learn what one rank does, and resume on any other layout.

Processes take seconds to start, so that each world is started once and trains one run after the other.
"""

from pathlib import Path
from typing import Any

import pytest

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from tests.distributed.spawn import run_distributed
from tests.distributed.test_faults import entries
from tests.distributed.test_pipelines import train_all
from tests.distributed.test_training_layouts import losses, norms
from tests.fixtures.tiny_run import tiny_document

pytestmark = pytest.mark.slow

# fp32: sums in another order.
TOLERANCE = 1e-6
STEPS = 4


def tensor(num_ranks: int, placement: str = "1d") -> dict[str, Any]:
    return {"placement": placement, "num_ranks": num_ranks}


def document(folder: Path, stage: int = 1, divided: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A dense run with 8 micro-batches in a step, dropout, clipping, pictures and packed rows."""
    changes = {"m6__moe": None, "m6__model__num_attention_heads": 8, "m6__data__packing": True, **changes}
    changes = {"train_batch_size": 16, "m6__parallel__tensor": divided, **changes}
    return tiny_document(folder, zero_optimization={"stage": stage}, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    tiny_document(folder)  # builds the data before the ranks start
    return folder


# name -> (changes of the run, placement on 4 ranks, ZeRO stage)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "1d x 2": ({"gradient_clipping": 0.1}, tensor(2), 1),
    "1d x 4": ({"m6__training__activation_checkpointing": True}, tensor(4), 1),
    "1d, ZeRO 0": ({"gradient_clipping": 0.1, "m6__model__rotary_base": 10000.0}, tensor(2), 0),
    "2d": ({"m6__model__patch_encoder": "resnet"}, tensor(4, "2d"), 0),
}
# 16 bits round the sums of different orders.
ROUNDED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "bf16": ({"bf16": {"enabled": True}}, tensor(2), 1),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, tensor(4, "2d"), 1),
}


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The folder with a run of one rank and a run of four ranks for each of the above."""
    alone, together = [], []
    for name, (changes, divided, zero) in {**RUNS, **ROUNDED}.items():
        alone.append((document(folder, 1 if name in ROUNDED else 0, **changes), folder / f"{name} alone"))
        together.append((document(folder, zero, divided, **changes), folder / name))
    run_distributed(train_all, 1, alone)
    run_distributed(train_all, 4, together)
    return folder


def reported(root: Path, *keys: str) -> list[list[float]]:
    return [[entry[key] for key in keys] for entry in entries(root) if "loss" in entry]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_reports_what_one_rank_reports(trained: Path, name: str):
    """Losses, validation, norms and counts."""
    found, expected = trained / name, trained / f"{name} alone"
    assert len(losses(found)) == STEPS + 4  # and the validation losses of four objectives
    assert losses(found) == pytest.approx(losses(expected), rel=TOLERANCE)
    assert norms(found) == pytest.approx(norms(expected), rel=TOLERANCE)
    counts = ("tokens_seen", "samples_seen", "bad_rows", "skipped_steps")
    assert reported(found, *counts) == reported(expected, *counts)


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_that_of_one_rank(trained: Path, name: str):
    """The same names, shapes and kinds of state, and values that four steps of AdamW leave alike."""
    ours, theirs = (
        CheckpointReader(complete_checkpoints(trained / run / "checkpoints")[-1]) for run in (name, f"{name} alone")
    )
    assert ours.shapes == theirs.shapes
    for key in ours.shapes:
        difference = (ours.read(*key) - theirs.read(*key)).abs().max()
        # AdamW divides by the root of squares: where a gradient is nearly 0, rounding decides the sign of the update.
        assert float(difference) < (2e-3 if key[1] == "weight" else 1e-5), key


@pytest.mark.parametrize("name", ROUNDED)
def test_precisions(trained: Path, name: str):
    found, expected = trained / name, trained / f"{name} alone"
    assert losses(found) == pytest.approx(losses(expected), rel=2e-3)
    assert norms(found)[-1] == pytest.approx(norms(expected)[-1], rel=2e-2)
