"""Ranks lie as m6 submit asks for, and another distribution is noticed."""

from pathlib import Path

import pytest

from m6.config.run import parse_config
from m6.runs.environment import DISTRIBUTION, misplacement
from m6.slurm.job import JobDescription
from tests.fixtures.tiny_run import tiny_document
from tests.slurm.cluster import LocalCluster, wait_until

pytestmark = pytest.mark.slurm


def nodes_of_ranks(cluster: LocalCluster, options: list[str], log: Path) -> list[str]:
    """Submits a job whose ranks say where they are; srun takes the distribution over from the job."""
    say = "srun bash -c 'echo $SLURM_PROCID $SLURMD_NODENAME'"
    job = cluster.run("sbatch", "--parsable", *options, f"--output={log}", f"--wrap={say}").strip()
    wait_until(lambda: cluster.state(job) == "COMPLETED", f"job {job}", interval_s=0.5)
    return [line.split()[1] for line in sorted(log.read_text().splitlines())]


def test_distribution(cluster: LocalCluster, tmp_path: Path):
    config = parse_config(tiny_document(tmp_path, m6__training__ep_size=2))
    job = JobDescription(
        nodes=2,
        ranks_per_node=2,
        cpus_per_rank=1,
        memory_gb_per_node=1,
        exclusive=False,
        time_limit_min=5,
        signal_lead_s=60,
    )
    neighbours = nodes_of_ranks(cluster, job.options(), tmp_path / "block")
    assert neighbours[0] == neighbours[1] != neighbours[2] == neighbours[3]
    assert misplacement(config, neighbours) is None
    options = [option for option in job.options() if option != DISTRIBUTION]
    turns = nodes_of_ranks(cluster, [*options, "--distribution=cyclic"], tmp_path / "cyclic")
    assert turns[0] == turns[2] != turns[1] == turns[3]
    said = misplacement(config, turns)
    assert said is not None
    assert "2 of 2 groups of experts are on several nodes" in said
