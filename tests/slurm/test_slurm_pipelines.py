"""A rank of a pipeline that hangs: the job says which stage is behind, and the next attempt goes on to the bit."""

import re
from pathlib import Path

import pytest

from tests.slurm.pipelines import RANKS, STEPS
from tests.slurm.run import ClusterRun

pytestmark = pytest.mark.slurm
PLACES = (
    "pipeline 0, stage 0, layers 0",
    "pipeline 1, stage 0, layers 0",
    "pipeline 0, stage 1, layers 1-4",
    "pipeline 1, stage 1, layers 1-4",
)
POSITION = re.compile(r"^ +(\d)     rank_0000(\d)\.log \((.+)\): m6/\S+\.py:\d+ in [\w<>]+(, waits for other ranks)?$")


@pytest.mark.nightly  # the watchdog ends a hanging rank by day, too: test_slurm_faults.py
@pytest.mark.scenario("pipeline_hang", "pipeline_left_alone")
def test_a_stage_that_hangs(played: tuple[ClusterRun, int], whole: ClusterRun):
    run, checkpoint = played
    assert len(whole.curve()) == STEPS, whole.log()
    assert run.curve() == whole.curve(), run.log()
    assert (run.root / "DONE").read_text() == f"{STEPS}\n"
    first, second = run.attempts()
    assert f"resumed {run.root} at step {checkpoint}" in (second / "rank_00000.log").read_text()
    said = next(run.root.glob("slurm/*.log")).read_text()
    assert f"stacks of {RANKS} of {RANKS} ranks" in said
    told = said.split("one of them and where it stands:\n")[1].splitlines()
    found = [match.groups() for line in told if (match := POSITION.match(line))]
    assert sum(int(count) for count, *_ in found) == RANKS, said
    assert all(place == PLACES[int(rank)] for _, rank, place, _ in found)
    # Only the one that was stopped waits for none, unless it was about to wait, too.
    behind = [rank for rank in range(RANKS) if not waits(first / f"rank_{rank:05d}.log")]
    assert behind in ([RANKS - 1], [])
    assert [int(rank) for _, rank, _, waiting in found if not waiting] == behind


def waits(log: Path) -> bool:
    """Whether a rank's main thread, the last that tells its stack, is in torch.distributed or its stopwatch."""
    innermost = log.read_text().rsplit("(most recent call first):\n", 1)[1].splitlines()[0]
    return "/torch/distributed/" in innermost or "/m6/training/reporting/ranks.py" in innermost
