"""Both stages on several ranks: layouts do not change what is learned, measured or delinked."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import TOLERANCE, layout, losses, norms, train

pytestmark = pytest.mark.slow

STEPS, SWITCH = 6, 3
SETTINGS = {
    "m6__model__num_layers": 4,
    "m6__training__total_steps": STEPS,
    "m6__checkpoint__interval_steps": STEPS,
    "m6__checkpoint__keep_last": 9,
    "m6__evaluation__interval_steps": STEPS,
    "m6__pseudo_to_real": {"switch_step": SWITCH, "correlation_interval_steps": 2},
}
CHECKPOINTING = {"m6__training__activation_checkpointing": True}


def document(folder: Path, ranks: int, stage: int, ep_size: int, **changes: Any) -> dict[str, Any]:
    return layout(folder, ranks, stage, ep_size, **{**SETTINGS, **changes})


def stages(root: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [line["stage"] for line in lines if "stage" in line]


def measured(root: Path, key: str) -> list[float]:
    return [value for stage in stages(root) for value in stage.get(key, [])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pseudo_to_real")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    root = folder / "reference"
    run_distributed(train, 1, document(folder, 1, 0, 1), str(root))
    assert [stage["name"] for stage in stages(root)] == ["pseudo"] * SWITCH + ["real"] * (STEPS - SWITCH)
    return root


def assert_equal(root: Path, reference: Path) -> None:
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(reference), rel=10 * TOLERANCE)
    for key, count in {"gradient_correlation": 9, "layer_divergence": 8}.items():
        assert len(measured(root, key)) == count
        # Differences of layers are small beside the layers, and their rounding is not.
        assert measured(root, key) == pytest.approx(measured(reference, key), rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "stage", "ep_size", "changes"),
    [
        pytest.param(2, 0, 2, {}, marks=pytest.mark.nightly),
        pytest.param(2, 1, 1, {}, marks=pytest.mark.nightly),
        (2, 1, 2, CHECKPOINTING),
        (4, 2, 2, {}),
    ],
)
def test_both_stages_do_not_depend_on_the_layout(
    folder: Path, reference: Path, ranks: int, stage: int, ep_size: int, changes: dict[str, Any]
):
    root = folder / f"run_{ranks}_{stage}_{ep_size}"
    run_distributed(train, ranks, document(folder, ranks, stage, ep_size, **changes), str(root))
    assert_equal(root, reference)


def test_a_dense_model_under_stage_3(folder: Path):
    dense = {"m6__moe": None, **CHECKPOINTING}
    roots = [folder / f"dense_{stage}" for stage in (0, 3)]
    for root, stage in zip(roots, (0, 3), strict=True):
        run_distributed(train, 1 if stage == 0 else 2, document(folder, 1, stage, 1, **dense), str(root))
    assert_equal(roots[1], roots[0])


def delink(run: str, out: str) -> None:
    """``m6 delink`` on every rank."""
    from m6.checkpoints.delink import delink_run
    from m6.runs.processes import start

    delink_run(Path(run), Path(out), start())


def test_a_run_delinked_elsewhere_goes_on_as_if_it_were_here(folder: Path, reference: Path):
    """Pseudo on two ranks, delinked on others, Real on four with other parallelism."""
    root, out = folder / "pseudo_elsewhere", folder / "real_elsewhere"
    run_distributed(train, 2, document(folder, 2, 1, 2), str(root), SWITCH)
    run_distributed(delink, 3, str(root), str(out))
    checkpoint = CheckpointReader(complete_checkpoints(out / "checkpoints")[-1])
    assert checkpoint.verify() == []
    assert checkpoint.state["pseudo_to_real"]["stage"] == "real"
    run_distributed(train, 4, document(folder, 4, 2, 4), str(out))
    assert losses(out) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert [stage["name"] for stage in stages(out)] == ["pseudo"] * SWITCH + ["real"] * (STEPS - SWITCH)


def test_a_run_whose_stages_have_layouts_of_their_own(folder: Path, reference: Path):
    """The first job ends at the switch; the second resumes the same run with other ZeRO, experts and checkpointing."""
    root, section = folder / "two_jobs", SETTINGS["m6__pseudo_to_real"]
    ends = {"m6__pseudo_to_real": {**section, "stop_at_switch": True}}
    run_distributed(train, 2, document(folder, 2, 1, 1, **ends), str(root))
    assert [stage["name"] for stage in stages(root)] == ["pseudo"] * SWITCH
    run_distributed(train, 2, document(folder, 2, 2, 2, **CHECKPOINTING), str(root))
    assert_equal(root, reference)


def diverging_ranks() -> None:
    """Every rank sees other correlations; all must take the main rank's decision."""
    from m6.runs.processes import start
    from m6.training.stages.stage import _decision_of_main_rank

    rank = start().rank
    assert _decision_of_main_rank(rank == 0) is True
    assert _decision_of_main_rank(rank != 0) is False


def test_all_ranks_decide_alike():
    run_distributed(diverging_ranks, 2)


def test_ranks_hold_one_copy_of_each_shared_tensor_in_a_pseudo_checkpoint(folder: Path, reference: Path):
    saved = CheckpointReader(reference / "checkpoints" / f"step_{SWITCH:08d}")
    real = CheckpointReader(reference / "checkpoints" / f"step_{STEPS:08d}")
    sizes = [sum(torch.Size(shape).numel() for shape in reader.shapes.values()) for reader in (saved, real)]
    layer = sum(torch.Size(s).numel() for (name, _), s in saved.shapes.items() if ".layers." in name)
    assert sizes[1] - sizes[0] == 3 * layer
