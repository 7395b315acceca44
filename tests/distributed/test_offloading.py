"""Offloaded experts on several ranks: the losses are those of one rank without offloading."""

from pathlib import Path

import pytest

from tests.distributed.spawn import run_distributed
from tests.distributed.test_training_layouts import TOLERANCE, folder, layout, losses, norms, reference, train

__all__ = ["folder", "reference"]  # fixtures

OFFLOAD = {"device_budget_mib": 5000.0, "chunk_mib": 0.001, "rules": [{"kind": "expert", "place": "stream"}]}


@pytest.mark.parametrize(("ranks", "stage", "ep_size"), [(2, 0, 1), (2, 1, 1), (2, 2, 2), (2, 0, 2), (4, 2, 2)])
def test_losses_are_those_of_one_rank(folder: Path, reference: Path, ranks: int, stage: int, ep_size: int):
    """And so are the norms, which at stages 1 and 2 DeepSpeed and the experts' store sum up together."""
    root = folder / f"offloaded_{ranks}_{stage}_{ep_size}"
    run_distributed(train, ranks, layout(folder, ranks, stage, ep_size, m6__offload=OFFLOAD), str(root), timeout_s=280)
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert norms(root) == pytest.approx(norms(reference), rel=1e-4)


def test_a_checkpoint_goes_on_under_another_ep_size(folder: Path, reference: Path):
    """Half the run on one rank, half on two that share the experts, as a run without offloading would."""
    root = folder / "offloaded_moves"
    run_distributed(train, 1, layout(folder, 1, 0, 1, m6__offload=OFFLOAD), str(root), 2, timeout_s=280)
    larger = {"device_budget_mib": 6000.0}
    run_distributed(train, 2, layout(folder, 2, 2, 2, m6__offload=larger), str(root), timeout_s=280)
    assert losses(root) == pytest.approx(losses(reference), rel=TOLERANCE)
