"""Copies the code of a submitted run, so that later changes of the checkout do not reach its chain of jobs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from m6.errors import UserError
from m6.files import copy_folder, write_json, write_text
from m6.lock import new_folder

SNAPSHOT = "snapshot.json"
_COPIED = ("m6", "moe", "native", "offload", "scripts/slurm")


def checkout() -> Path:
    """The folder of the sources.

    Raises:
        UserError: it has no job scripts, as in an installed package.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "scripts" / "slurm" / "job.sh").is_file():
        raise UserError(f"{root}: has no scripts/slurm/job.sh; m6 submit needs a checkout of the repository")
    return root


def take_snapshot(target: Path, document: dict[str, Any]) -> None:
    """Copies the packages and the job scripts to ``target``, with the run's JSON as ``config.json``."""
    root = checkout()
    with new_folder(target) as partial:
        for name in _COPIED:
            copy_folder(root / name, partial / name, ignored=["__pycache__"])
        write_json(partial / "config.json", document)
        # The copy is no git repository, so it records the commit and the uncommitted changes.
        patch = git(root, "diff", "HEAD")
        if patch:
            write_text(partial / "patch.diff", patch)
        commit = git(root, "rev-parse", "HEAD").strip() or None
        write_json(partial / SNAPSHOT, {"git_commit": commit, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def git(folder: Path, *arguments: str) -> str:
    """Returns what git prints; empty if git fails, is missing, or ``folder`` is not in a repository."""
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""
