"""Runs that go on elsewhere: in the next job of a chain, on another number of nodes, after a kill at any moment."""

import pytest

from tests.slurm.kills import INTERVAL, Kill
from tests.slurm.run import ClusterRun
from tests.slurm.scenarios import KILLS

pytestmark = pytest.mark.slurm
# fp32 sums in another order, see tests/distributed/test_training_layouts.py
TOLERANCE = 1e-5


@pytest.mark.scenario("chain", "left_alone")
def test_a_chain_of_jobs(played: tuple[ClusterRun, list[str]], whole: ClusterRun):
    judge_successors(*played, whole)


@pytest.mark.nightly  # the successors of a chain go on alike
@pytest.mark.scenario("array", "left_alone")
def test_an_array_where_a_site_forbids_to_requeue(played: tuple[ClusterRun, list[str]], whole: ClusterRun):
    judge_successors(*played, whole)


def judge_successors(run: ClusterRun, jobs: list[str], whole: ClusterRun):
    assert run.curve() == whole.curve(), run.log()
    fields = [run.cluster.job_fields(job) for job in jobs]
    assert [(one["JobState"], one["Restarts"], one["Requeue"]) for one in fields] == [("COMPLETED", "0", "0")] * 3
    assert len(run.attempts()) == 2, "the third found nothing left to do"
    ends, starts = [one["EndTime"] for one in fields], [one["StartTime"] for one in fields]
    assert all(end <= start for end, start in zip(ends[:-1], starts[1:], strict=True)), "one after the other"


@pytest.mark.scenario("other_number_of_nodes", "left_alone")
def test_the_next_attempt_has_half_of_the_nodes(played: tuple[ClusterRun, int], whole: ClusterRun):
    run, stopped_at = played
    first, second = ((attempt / "job.txt").read_text() for attempt in run.attempts())
    assert "NumNodes=4" in first
    assert "NumNodes=2" in second
    assert f"resumed {run.root} at step {stopped_at}" in run.log()
    ours, theirs = run.entries(), whole.entries()
    for name in ("step", "samples_seen", "tokens_seen", "learning_rate"):
        assert [entry.get(name) for entry in ours] == [entry.get(name) for entry in theirs], "batch, data and schedule"
    for name in ("loss", "grad_norm"):
        assert [entry[name] for entry in ours if "loss" in entry] == pytest.approx(
            [entry[name] for entry in theirs if "loss" in entry], rel=TOLERANCE
        )


@pytest.mark.nightly  # rank_crash and tests/distributed/test_kill_and_resume.py kill by day
@pytest.mark.scenario("random_kills", "long_left_alone")
def test_kills_at_random_moments(played: tuple[ClusterRun, list[Kill]], whole: ClusterRun):
    run, kills = played
    assert run.curve() == whole.curve(), run.log()
    assert run.cluster.state(run.job) == "COMPLETED"
    assert len(kills) == KILLS
    # A checkpoint of this size is written in an instant, which the kills that aim at it may miss.
    assert {"starting", "training"} <= {kill.moment for kill in kills}
    for kill in kills:
        assert kill.resumed_at == kill.checkpoint, "the newest complete checkpoint was the one taken"
        # A checkpoint is written while training goes on to the next one, so that up to two intervals are at stake.
        assert kill.lost_steps <= 2 * INTERVAL
