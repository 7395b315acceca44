"""Whether a folder is on a network file system, by the kernel's list of mount points."""

import os
from pathlib import Path

import pytest

from m6.slurm.submission import file_system_type


@pytest.mark.parametrize(
    ("mount", "name"),
    [
        ("/数据".encode(), "/数据"),
        (b"/my\\040data\\134x", "/my data\\x"),
        (b"/caf\xe9", os.fsdecode(b"/caf\xe9")),  # Latin-1
    ],
    ids=["Chinese", "escaped", "no UTF-8"],
)
def test_mount_points_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: bytes, name: str):
    mounts = tmp_path / "mountinfo"
    lines = [b"36 25 0:32 / " + point + b" rw,noatime shared:1 - " for point in (b"/", mount)]
    mounts.write_bytes(lines[0] + b"ext4 /dev/sda1 rw\n" + lines[1] + b"nfs4 server:/ rw\n")
    monkeypatch.setattr("m6.slurm.submission._MOUNTS", mounts)
    assert file_system_type(Path(name, "run")) == "nfs4"
    assert file_system_type(Path("/elsewhere")) == "ext4"
