"""What happens to runs on a cluster: every one of them ends with the loss curve of the run that was left alone.

To the bit where the layout stayed the same; see docs/guides/slurm.md.
"""

import re

import pytest

from tests.slurm.run import INTERVAL, STEPS, ClusterRun

pytestmark = pytest.mark.slurm


def assert_same_as(whole: ClusterRun, run: ClusterRun) -> None:
    assert run.curve() == whole.curve(), run.log()


@pytest.mark.scenario("left_alone")
def test_a_run_that_is_left_alone(played: ClusterRun):
    run = played
    assert [entry["step"] for entry in run.entries()][:STEPS] == list(range(1, STEPS + 1))
    assert (run.root / "DONE").read_text().strip() == str(STEPS)
    assert run.cluster.state(run.job) == "COMPLETED"
    [attempt] = run.attempts()
    names = {path.name for path in attempt.iterdir()}
    assert names >= {"job.txt", "script.sh", "config.json", "rank_00000.log", "rank_00001.log", "preflight"}
    assert {path.read_text() for path in (attempt / "preflight").glob("n*.txt")} == {"ok\n"}
    assert f"finished {run.root} at step {STEPS}" in (attempt / "rank_00000.log").read_text()


@pytest.mark.scenario("stop_and_resume", "left_alone")
def test_a_stop_before_the_time_limit(played: tuple[ClusterRun, int], whole: ClusterRun):
    run, signalled_at = played
    assert_same_as(whole, run)
    assert run.cluster.job_fields(run.job)["Restarts"] == "1", "the job requeued itself"
    first, second = run.attempts()
    said = (first / "rank_00000.log").read_text()
    stopped_at = int(said.rsplit("at step ", 1)[1])
    assert signalled_at <= stopped_at < STEPS
    assert f"resumed {run.root} at step {stopped_at}" in (second / "rank_00000.log").read_text()


@pytest.mark.scenario("stop_during_preflight", "left_alone")
def test_a_stop_during_preflight_is_remembered(played: ClusterRun, whole: ClusterRun):
    assert_same_as(whole, played)
    first, _ = played.attempts()
    assert not list(first.glob("rank_*.log")), "no rank was started"
    assert played.cluster.job_fields(played.job)["Restarts"] == "1"


@pytest.mark.scenario("stop_while_starting", "left_alone")
def test_a_stop_while_the_ranks_are_starting(played: ClusterRun, whole: ClusterRun):
    """A process that imports has no handler yet, and a signal would end it: it waits until there is one."""
    assert_same_as(whole, played)
    first, second = played.attempts()
    stopped_at = int((first / "rank_00000.log").read_text().rsplit("at step ", 1)[1])
    assert stopped_at == 1
    assert f"resumed {played.root} at step 1" in (second / "rank_00000.log").read_text()


@pytest.mark.scenario("time_limit", "left_alone")
def test_the_signal_that_slurm_sends_before_the_time_limit(played: ClusterRun, whole: ClusterRun):
    assert_same_as(whole, played)
    fields = played.cluster.job_fields(played.job)
    assert fields["JobState"] == "COMPLETED"
    stops = played.log().count(": asked to stop")
    assert stops >= 1
    assert fields["Restarts"] == str(stops), "each time it saved, and requeued itself"
    first, second = played.attempts()[:2]
    stopped_at = int((first / "rank_00000.log").read_text().rsplit("at step ", 1)[1])
    assert f"resumed {played.root} at step {stopped_at}" in (second / "rank_00000.log").read_text()


@pytest.mark.scenario("stopped_before_saving")
def test_a_job_that_is_stopped_before_it_can_save(played: ClusterRun):
    assert played.cluster.state(played.job) == "FAILED"
    assert played.cluster.job_fields(played.job)["Restarts"] == "1", "the first time it may have been bad luck"
    assert "two attempts in a row were stopped before they could save anything" in (played.root / "FATAL").read_text()
    assert len(played.attempts()) == 2


@pytest.mark.scenario("mistake")
def test_a_mistake_is_made_once(played: ClusterRun):
    assert played.cluster.state(played.job) == "FAILED"
    reason = (played.root / "FATAL").read_text()
    assert 'm6.training.totl_steps: unknown key; did you mean "total_steps"?' in reason
    assert reason.count("\n") == 1
    assert len(played.attempts()) == 1
    assert played.cluster.job_fields(played.job)["Restarts"] == "0"


@pytest.mark.scenario("smoke_script")
def test_the_smoke_script_as_it_is(played: ClusterRun):
    assert played.cluster.state(played.job) == "COMPLETED", played.root.with_suffix(".log").read_text()
    assert (played.root / "DONE").read_text() == "4\n"
    assert played.step() == 4
    assert played.cluster.job_fields(played.job)["NumNodes"] == "2"


@pytest.mark.scenario("cancelled")
def test_a_job_that_a_person_cancels(played: ClusterRun):
    assert played.cluster.state(played.job) == "CANCELLED"
    assert played.cluster.job_fields(played.job)["Restarts"] == "0"
    assert len(played.attempts()) == 1, "not tried again"
    assert played.step() < STEPS
    assert not {"DONE", "FATAL"} & {path.name for path in played.root.iterdir()}


@pytest.mark.scenario("rank_crash", "left_alone")
def test_a_rank_that_dies(played: tuple[ClusterRun, int], whole: ClusterRun):
    run, checkpoint = played
    assert_same_as(whole, run)
    _, second = run.attempts()
    assert f"resumed {run.root} at step {checkpoint}" in (second / "rank_00000.log").read_text()
    assert run.cluster.job_fields(run.job)["Restarts"] == "0", "the same allocation went on"


@pytest.mark.scenario("crash_loop")
def test_crashes_without_progress_come_to_an_end(played: ClusterRun):
    assert played.cluster.state(played.job) == "FAILED"
    assert "two attempts in a row ended without a new checkpoint after step 0" in (played.root / "FATAL").read_text()
    assert len(played.attempts()) == 2


@pytest.mark.scenario("hang", "left_alone")
def test_a_rank_that_hangs(played: tuple[ClusterRun, int], whole: ClusterRun):
    run, checkpoint = played
    assert_same_as(whole, run)
    first, second = run.attempts()
    assert f"resumed {run.root} at step {checkpoint}" in (second / "rank_00000.log").read_text()
    for rank in (0, 1):
        assert "most recent call first" in (first / f"rank_{rank:05d}.log").read_text(), "every rank told its stacks"
    assert "all_reduce" in (first / "rank_00000.log").read_text(), "rank 0 was waiting for the other"
    assert "gloo:all_reduce" in (first / "flight_recorder_00000.json").read_text()
    said = next(run.root.glob("slurm/*.log")).read_text()
    assert re.search(r"and where it stands:\n +\d     rank_0000\d\.log: m6/training/\S+\.py:\d+ in \w+", said)


@pytest.mark.scenario("not_finite")
def test_a_loss_that_is_not_finite_is_fatal(played: ClusterRun):
    assert played.cluster.state(played.job) == "FAILED"
    assert "were not finite" in (played.root / "FATAL").read_text()
    assert len(played.attempts()) == 1, "never tried again"
    assert played.cluster.job_fields(played.job)["Restarts"] == "0"
    assert {path.name.split("_")[3] for path in (played.root / "nonfinite").iterdir()} == {"00000", "00001"}


@pytest.mark.scenario("lost_node", "left_alone")
def test_a_node_that_is_lost(played: tuple[ClusterRun, str, int], whole: ClusterRun):
    run, lost, checkpoint = played
    assert_same_as(whole, run)
    last = run.attempts()[-1]
    assert f"resumed {run.root} at step {checkpoint}" in (last / "rank_00000.log").read_text()
    assert lost not in {path.stem for path in (last / "preflight").glob("f*.txt")}


@pytest.mark.scenario("sick_node", "left_alone")
def test_a_sick_node_is_left_out(played: tuple[ClusterRun, str, str], whole: ClusterRun):
    run, sick, successor = played
    assert_same_as(whole, run)
    assert run.cluster.job_fields(successor)["ExcNodeList"] == sick
    first, second = run.attempts()
    assert (first / "preflight" / f"{sick}.txt").read_text() == "PREFLIGHT_HOOK: smells of smoke\n"
    assert not list(first.glob("rank_*.log"))
    assert f"{sick}.txt" not in {path.name for path in (second / "preflight").iterdir()}


@pytest.mark.scenario("all_nodes_sick")
def test_when_every_node_is_sick_the_check_is(played: ClusterRun):
    judge_refused(played, "preflight found every node sick, which is no matter of the nodes")
    assert "PREFLIGHT_HOOK: too strict" in played.log()


@pytest.mark.scenario("silent_node")
def test_a_node_that_says_nothing_is_sick(played: ClusterRun):
    judge_refused(played, "preflight found every node sick")
    [attempt] = played.attempts()
    reports = [path.read_text() for path in (attempt / "preflight").glob("*.txt")]
    assert len(reports) == 2
    # The hook may die just before the process that would tell of it.
    said = ("no report within 5 s\n", "PREFLIGHT_HOOK: exit code -")
    assert all(report.startswith(said) for report in reports), reports


@pytest.mark.scenario("no_room")
def test_without_room_for_checkpoints_nothing_starts(played: ClusterRun):
    judge_refused(played, "GiB of disk are left, 1000000000 are asked for")


def judge_refused(run: ClusterRun, reason: str):
    assert run.cluster.state(run.job) == "FAILED"
    assert run.cluster.job_fields(run.job)["Restarts"] == "0"
    assert reason in (run.root / "FATAL").read_text()
    assert not list(run.root.glob("slurm/attempts/*/rank_*.log"))


@pytest.mark.scenario("corrupt_checkpoint", "left_alone")
def test_switch_files_and_a_corrupt_newest_checkpoint(played: dict, whole: ClusterRun):
    run = played["run"]
    assert played["granted"] % INTERVAL, "a checkpoint of its own"
    assert played["state_after_stop"] == "COMPLETED"
    assert played["restarts"] == "0", "STOP is not requeued"
    assert_same_as(whole, run)
    said = (run.attempts()[-1] / "rank_00000.log").read_text()
    damaged, before = played["checkpoints"][-1], played["checkpoints"][-2]
    assert f"warning: checkpoint not used: {run.root}/checkpoints/step_{damaged:08d}/" in said
    assert f"resumed {run.root} at step {before}" in said
    assert (run.root / "checkpoints" / f"corrupt_step_{damaged:08d}").exists()


@pytest.mark.scenario("full_disk", "left_alone")
def test_a_disk_that_is_full_while_saving(played: tuple[ClusterRun, str], whole: ClusterRun):
    run, reason = played
    assert "two attempts in a row ended without a new checkpoint" in reason
    assert "a checkpoint could not be written" in reason
    assert_same_as(whole, run)
