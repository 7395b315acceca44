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
    # At first it has those of the four nodes that other runs left free.
    first, *others = records
    assert [(record.available, record.nodes) for record in others] == [(1, 1), (2, 2)]
    assert first.nodes == {1: 1, 2: 2, 3: 2, 4: 4}[first.available], "three nodes do not divide four micro-batches"
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
