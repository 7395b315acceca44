"""Checks whether a folder is on a shared file system, as far as one node can tell."""

from __future__ import annotations

import os
import re
from pathlib import Path

from m6.errors import UserError

_MOUNTS = Path("/proc/self/mountinfo")
# Network file systems, by their type in /proc/self/mountinfo (proc(5)).
_NETWORK = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "wekafs",
    "glusterfs",
    "orangefs",
    "panfs",
)


def check_shared(key: str, folder: Path, shared_folders: list[str]) -> None:
    """Checks whether all nodes can see a folder.

    Args:
        key: the key or option of the folder, for messages.
        folder: the folder to check.
        shared_folders: folders shared by all nodes. If there are any, ``folder`` must be in one of them; otherwise it
            must be on a network file system.

    Raises:
        UserError: the folder is not shared.
    """
    resolved = folder.resolve()
    if shared_folders:
        if not any(resolved.is_relative_to(Path(shared).resolve()) for shared in shared_folders):
            raise UserError(
                f"{key} {folder}: not in a folder that all nodes share (shared_folders: {', '.join(shared_folders)})"
            )
        return
    kind = file_system_type(resolved)
    if kind.removeprefix("fuse.") not in _NETWORK:
        raise UserError(
            f"{key} {folder}: is on {kind or 'an unknown file system'}, which other nodes cannot see; choose a folder "
            "on a network file system, or list the folders that all nodes have alike in the job's shared_folders"
        )


def file_system_type(path: Path) -> str:
    """Returns the type of the file system of ``path``, such as ``lustre``; empty if it is not known."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return ""
    # The file system of a path is its longest mount point; of equal ones, the one mounted last.
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(b" - ")
        # Spaces in mount points are escaped as octal numbers; other bytes, of any encoding, are as they are.
        escaped = left.split(b" ")[4]
        mount = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), escaped))
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), os.fsdecode(right.split(b" ")[0])
    return kind
