"""The files of a plan."""

import time
from pathlib import Path

import pytest

from m6.config.run import parse_config
from m6.errors import UserError
from m6.planning.cost.layout import layout_of
from m6.planning.machine.calibration import _write_bytes_per_s
from m6.planning.machine.profile import Profile
from m6.planning.reports import checkpoint_line
from m6.planning.search.job_files import (
    checkpoint_s,
    job_description,
    job_files,
    sbatch_header,
    signal_lead_s,
)
from tests.fixtures.plans import planner


@pytest.mark.parametrize(
    ("name", "cluster"),
    [("m6t_100b", "a100_80g_x128"), ("m6t_1t", "v100_32g_x480"), ("m6t_10b", "h200_x128"), ("m6t_base", "gb200_x72")],
)
def test_emitted_files(name: str, cluster: str):
    world = {"m6t_10b": 16, "m6t_base": 64}.get(name)
    forced = {"ep_size": 480, "micro_batch_size": 4} if name == "m6t_1t" else None  # a search of all takes long
    subject = planner(name, cluster, world=world, forced=forced)
    plan = subject.search().best
    (files,) = job_files([subject], [plan], name, time_limit_min=720)
    again = parse_config(files.document)
    assert layout_of(again, plan.layout.world_size) == plan.layout
    job = files.job
    header = sbatch_header(job, name)
    nodes = subject.cluster.nodes[0]
    assert f"--nodes={nodes.count}\n" in header
    assert f"--gpus-per-node={nodes.devices_per_node}\n" in header
    assert f"--signal=B:USR2@{signal_lead_s(subject, plan)}\n" in header
    assert signal_lead_s(subject, plan) >= plan.time.total + 2 * checkpoint_s(subject, plan) + 60
    assert all(line.startswith("#SBATCH --") for line in header.splitlines())
    assert job.world_size == plan.layout.world_size


def test_a_job_that_ends_before_it_can_be_told_to():
    subject = planner("m6t_100b", "a100_80g_x128")
    with pytest.raises(UserError, match="time_limit_min 1 leaves no time to train"):
        job_description(subject, subject.search().best, time_limit_min=1)


def test_the_checksum_counts_as_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkpoint is whole only when each file has been read for it, which may take longer than the disk."""
    read: list[Path] = []
    monkeypatch.setattr("m6.planning.machine.calibration.sha256", lambda path: read.append(path) or time.sleep(0.5))
    assert _write_bytes_per_s(tmp_path) <= (16 << 24) / 0.5
    assert read == [tmp_path / "m6_calibration_0"]


def test_measured_writing_decides_when_a_job_is_told(tmp_path: Path):
    rate = _write_bytes_per_s(tmp_path / "runs")
    assert rate > 0
    assert not list((tmp_path / "runs").iterdir())
    leads = []
    for seconds in (1.0, 600.0):
        profile = Profile(checkpoint_bytes_per_s=9.68e9 / seconds)
        subject = planner("m6t_100b", "a100_80g_x128", profile=profile, forced={"zero_stage": 1, "ep_size": 128})
        best = subject.search().best
        assert checkpoint_s(subject, best) == pytest.approx(seconds, rel=1e-2)
        leads.append(signal_lead_s(subject, best))
        assert f"{leads[-1]} s before its end" in checkpoint_line(subject, best)
    assert leads[1] - leads[0] == pytest.approx(2 * 600, abs=60), "one may be under way when the job is told"
