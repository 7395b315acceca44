"""Compares a run on several ranks with the same run on one."""

from pathlib import Path

import pytest

from m6.checkpoints.discovery import complete_checkpoints
from m6.checkpoints.format import CheckpointReader
from tests.distributed.test_faults import entries
from tests.distributed.test_training_layouts import losses, norms

# fp32: sums in another order. The measured errors are below 2e-7.
TOLERANCE = 1e-6
COUNTS = ("tokens_seen", "samples_seen", "bad_rows", "skipped_steps")


def reported(root: Path, *keys: str) -> list[list[float]]:
    return [[entry[key] for key in keys] for entry in entries(root) if "loss" in entry]


def router_statistics(root: Path) -> list[list[float]]:
    """The loss of the routers, and how they spread tokens over experts, of each line that reports a loss."""
    keys = ("load_cv", "dropped_fraction", "unused_experts", "router_entropy", "experts_per_token")
    of_all = (*keys, "tokens_without_expert", "gate_sum")
    reports = [entry for entry in entries(root) if "loss" in entry]
    found = []
    for entry in reports:
        of_layers = [entry.get("experts", {}).get(key, []) for key in of_all]
        values = [each for value in of_layers for each in (value if isinstance(value, list) else [value])]
        found.append([entry["aux_loss"], *values])
    return found


def assert_reports_alike(found: Path, expected: Path, num_losses: int) -> None:
    """Losses of ``num_losses`` steps and validations, norms and counts."""
    assert len(losses(found)) == num_losses
    assert losses(found) == pytest.approx(losses(expected), rel=TOLERANCE)
    assert norms(found) == pytest.approx(norms(expected), rel=TOLERANCE)
    assert reported(found, *COUNTS) == reported(expected, *COUNTS)


def assert_rounded_alike(found: Path, expected: Path) -> None:
    """16 bits round the sums of different orders; a run in fp16 has some steps that overflow, and the same ones."""
    assert losses(found) == pytest.approx(losses(expected), rel=2e-3)
    assert norms(found)[-1] == pytest.approx(norms(expected)[-1], rel=2e-2)
    if found.name == "fp16":
        scales = reported(found, "loss_scale", "skipped_steps")
        assert scales == reported(expected, "loss_scale", "skipped_steps")
        assert {skipped for _, skipped in scales} == {0, 1}


def state_errors(found: Path, expected: Path) -> dict[tuple[str, str], float]:
    """Name and kind of a tensor -> the largest difference between the last checkpoints, which have the same tensors."""
    ours, theirs = (CheckpointReader(complete_checkpoints(run / "checkpoints")[-1]) for run in (found, expected))
    assert ours.shapes == theirs.shapes
    return {key: float((ours.read(*key) - theirs.read(*key)).abs().max()) for key in ours.shapes}
