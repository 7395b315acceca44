"""How much memory the host has left, as the system and the control group tell it."""

from pathlib import Path

import pytest

from offload.memory import host_memory


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
