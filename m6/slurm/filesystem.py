"""Whether all nodes see a folder, as far as one of them can tell."""

from __future__ import annotations

from pathlib import Path

from m6.errors import UserError

# Types in /proc/self/mountinfo (proc(5)) of file systems that other nodes mount too.
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


def check_shared(folder: Path, shared_folders: list[str]) -> None:
    """Raises unless ``folder`` lies in one of ``shared_folders`` or, if there are none, on a network file system."""
    resolved = folder.resolve()
    if shared_folders:
        if not any(resolved.is_relative_to(Path(shared).resolve()) for shared in shared_folders):
            raise UserError(
                f"{folder}: not in a folder that all nodes share (shared_folders: {', '.join(shared_folders)})"
            )
        return
    kind = file_system_type(resolved)
    if kind.removeprefix("fuse.") not in _NETWORK:
        raise UserError(
            f"{folder}: lies on {kind or 'an unknown file system'}, which other nodes do not see; choose a --run-dir "
            "on a network file system, or name the folders that all nodes share in the cluster's shared_folders"
        )


def file_system_type(path: Path) -> str:
    """The type of the mount that ``path`` lies on, such as ``lustre``; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), right.split()[0]
    return kind
