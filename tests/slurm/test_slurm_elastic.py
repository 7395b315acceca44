"""A job that comes back with other nodes: a new layout each time, and to the bit the numbers of a run left alone."""

import pytest

from m6.runs.layouts import measured_steps, read_layouts
from m6.slurm.status import describe_status
from tests.slurm.run import STEPS, ClusterRun

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]


@pytest.mark.scenario("elastic")
def test_nodes_that_come_and_go(played: tuple[ClusterRun, ClusterRun]):
    run, alone = played
    # All but the entropies of the routers, which are means over the micro-batches in another order.
    ours, theirs = ([entry[:-1] for entry in each.curve()] for each in (run, alone))
    assert ours == theirs, run.log()
    assert len(ours) == STEPS, (alone.folder / "elastic_alone.log").read_text()
    records = read_layouts(run.root)
    assert [record.nodes for record in records] == [4, 1, 2]
    assert [record.layout["world_size"] for record in records] == [4, 1, 2]
    assert "--nodes=1-4\n" in (run.root / "slurm" / "sbatch_options").read_text()
    assert records[0].reason == "the fastest that fits"
    assert "does not fit these nodes" in records[1].reason
    # Preempted, it lost the steps after the newest checkpoint; asked to stop, none.
    assert records[1].step % 10 == 0
    assert records[2].step >= 50
    measured = measured_steps(run.root, records)
    assert all(seconds is not None and seconds > 0 for seconds in measured)
    status = [line for line in describe_status(run.root).splitlines() if line.startswith("layout")]
    assert [line.split("step ")[1].split(", ")[1].split(":")[0] for line in status] == [
        "4 of 4 nodes",
        "1 of 1 nodes",
        "2 of 2 nodes",
    ]
    assert all("measured" in line and "not measured" not in line for line in status)
