"""Blocks of host memory, and how much of it is left, as the system and the control group tell it."""

import os
from pathlib import Path

import pytest
import torch

from offload import SimulatedDevice
from offload.memory import host_memory
from offload.memory.host_memory import HostBlock

V2 = ("0::{}", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
V1 = ("4:memory:{}", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds the system's files in a test."""
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read_text(tmp_path / str(path)[1:], **options))
    return tmp_path


@pytest.mark.parametrize("inner", ["", "job_7", "job_7/step_0/task_1"])
@pytest.mark.parametrize(("line", "root", "limit", "usage", "cache"), [V1, V2], ids=["v1", "v2"])
def test_the_system_or_a_control_group_whichever_has_least(
    line: str, root: str, limit: str, usage: str, cache: str, inner: str, system: Path
) -> None:
    """The group of the limit is the process's own, that of its job around it, or the root that a container shows."""
    assert host_memory.available_bytes() is None
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    5000 kB\nMemFree: 1 kB\n")
    assert host_memory.available_bytes() == 5000 * 1024
    (system / "proc/self/cgroup").write_text(f"9:pids:/\n{line.format('/job_7/step_0/task_1')}\n")
    group = system / root / inner
    group.mkdir(parents=True)
    (group / limit).write_text("max\n")
    (group / usage).write_text("1000000\n")
    assert host_memory.available_bytes() == 5000 * 1024, "the group has no limit"
    (group / limit).write_text("3000000\n")
    (group / "memory.stat").write_text(f"active_file 7\n{cache} 200000\n")
    assert host_memory.available_bytes() == 3_000_000 - 1_000_000 + 200_000
    (group / usage).write_text("4000000\n")
    assert host_memory.available_bytes() == 0


def test_the_narrowest_of_nested_control_groups(system: Path) -> None:
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_text("0::/job_7/step_0\n")
    for inner, most in (("job_7/step_0", 9_000), ("job_7", 3_000), ("", 5_000)):
        group = system / "sys/fs/cgroup" / inner
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text("1000\n")
    assert host_memory.available_bytes() == 2_000


def test_a_forked_process_has_no_copy_of_a_block() -> None:
    """A data worker's copy would leave one of the two processes with a page that the card does not know."""
    block = HostBlock(2**21, SimulatedDevice(10**9))
    values = block.view(torch.uint8, 0, (2**21,))
    values.fill_(3)
    begin = values.data_ptr()
    child = os.fork()
    if child == 0:
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        os._exit(any(int(first, 16) <= begin < int(last, 16) for first, last in ranges))
    assert os.waitpid(child, 0)[1] == 0
    assert values.eq(3).all()
    block.free()
