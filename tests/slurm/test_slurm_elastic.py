"""A job that comes back with other nodes: a new layout each time, and the numbers of a run left alone."""

import subprocess
from pathlib import Path

import pytest

from m6.runs.layouts import LayoutRecord, measured_steps, read_layouts
from m6.slurm.status import describe_status
from tests.slurm.cluster import LocalCluster, wait_until
from tests.slurm.elastic import STEPS
from tests.slurm.run import ClusterRun

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.scenario("elastic")
def test_nodes_that_come_and_go(played: tuple[ClusterRun, ClusterRun]):
    """In the mode "any_world" to the bit."""
    run, alone = played
    # All but the entropies of the routers, which are means over the micro-batches in another order.
    ours, theirs = ([entry[:-1] for entry in each.curve()] for each in (run, alone))
    assert ours == theirs, run.log()
    records = check_course(run, alone)
    assert {record.layout["ep_size"] for record in records} == {1}


@pytest.mark.nightly
@pytest.mark.scenario("elastic_experts")
def test_nodes_that_come_and_go_split_the_experts_anew(played: tuple[ClusterRun, ClusterRun]):
    """In fp32 other ranks and another ``ep_size`` add up in another order: 1e-5 of losses near 6 are a hundred units in
    the last place, against the ten or so that 120 steps were seen to make of them."""
    run, alone = played
    ours, theirs = ([entry for entry in each.entries() if "loss" in entry] for each in (run, alone))
    for name in ("step", "learning_rate", "samples_seen", "tokens_seen"):
        assert [entry[name] for entry in ours] == [entry[name] for entry in theirs], run.log()
    for name, tolerance in (("loss", 1e-5), ("aux_loss", 1e-5), ("grad_norm", 1e-4)):
        expected = pytest.approx([entry[name] for entry in theirs], rel=tolerance)
        assert [entry[name] for entry in ours] == expected, name
    records = check_course(run, alone)
    assert [record.layout["ep_size"] for record in records] == [record.nodes for record in records]


@pytest.mark.parametrize(
    ("constraint", "number"), [("virtual", 2), ("fast", 1), ("virtual&fast", 1), ("fast|virtual", 0)]
)
def test_idle_nodes_are_those_that_a_job_may_have(cluster: LocalCluster, constraint: str, number: int):
    """n1 and n2 are fast. Other jobs come and go meanwhile, so that both are asked until nothing changed in between."""
    options = ("--partition=smoke", "--begin=now+1hour", "--exclude=n2,n4", f"--constraint={constraint}")
    job = cluster.run("sbatch", "--parsable", *options, "--wrap=true").strip()
    environment = {**cluster.environment, "SLURM_JOB_ID": job, "SLURM_JOB_PARTITION": "smoke"}

    def counted() -> bool:
        before = cluster.idle_nodes()
        script = f"set -euo pipefail; source {ROOT}/scripts/slurm/lib/layout.sh; idle_nodes"
        found = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
        return before == cluster.idle_nodes() >= {"n1", "n2", "n3", "n4"} and found.stdout == f"{number}\n"

    try:
        wait_until(counted, "an answer without n2 and n4", interval_s=2)
    finally:
        cluster.run("scancel", job)


def check_course(run: ClusterRun, alone: ClusterRun) -> list[LayoutRecord]:
    """Checks what the job did, and returns its layouts."""
    assert len(run.curve()) == STEPS, alone.root.with_suffix(".log").read_text()
    records = read_layouts(run.root)
    # At first it has those of the four nodes that other runs left free.
    first, *others = records
    assert [(record.available, record.nodes) for record in others] == [(1, 1), (2, 2)]
    assert first.nodes == {1: 1, 2: 2, 3: 2, 4: 4}[first.available], "three nodes compute two of four, as two do"
    assert all(record.layout["world_size"] == record.nodes for record in records)
    assert "--nodes=1-4\n" in (run.root / "slurm" / "sbatch_options").read_text()
    assert first.reason == "the fastest that fits"
    assert first.nodes == 1 or "does not fit these nodes" in others[0].reason
    # Preempted, it lost the steps after the newest checkpoint; asked to stop, none.
    assert records[1].step % 10 == 0
    assert records[2].step >= 50
    measured = measured_steps(run.root, records)
    assert all(seconds is not None and seconds > 0 for seconds in measured)
    status = [line for line in describe_status(run.root).splitlines() if line.startswith("layout")]
    for line, record in zip(status, records, strict=True):
        assert f"from step {record.step}, {record.nodes} of {record.available} nodes: " in line
    assert all("measured" in line and "not measured" not in line for line in status)
    return records
