"""The tutorial from submit to resume, on the local cluster."""

import pytest

from tests.slurm.run import STEPS, ClusterRun

pytestmark = pytest.mark.slurm


@pytest.mark.scenario("tutorial")
def test_a_run_is_submitted_stopped_and_resumed(played: tuple[ClusterRun, int]):
    run, stopped_at = played
    assert 0 < stopped_at < STEPS
    assert f"resumed {run.root} at step {stopped_at}" in run.log()
    assert (run.root / "DONE").exists()
    steps = [entry["step"] for entry in run.entries() if "loss" in entry]
    assert steps == list(range(1, STEPS + 1))
