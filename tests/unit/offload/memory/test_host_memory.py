"""Blocks of host memory, and how much of it is left, as the system and the control group tell it."""

import os
from pathlib import Path

import pytest
import torch

from offload import SimulatedDevice
from offload.memory import host_memory
from offload.memory.host_memory import HostBlock


def test_the_system_or_the_control_group_whichever_has_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **options: read_text(tmp_path / path.name, **options))
    assert host_memory.available_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    5000 kB\nMemFree: 1 kB\n")
    assert host_memory.available_bytes() == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert host_memory.available_bytes() == 5000 * 1024, "the group has no limit"
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("active_file 7\ninactive_file 200000\n")
    assert host_memory.available_bytes() == 3_000_000 - 1_000_000 + 200_000
    (tmp_path / "memory.current").write_text("4000000\n")
    assert host_memory.available_bytes() == 0


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
