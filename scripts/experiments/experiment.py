"""What experiments share: a CSV that grows by finished runs and is resumed, and runs of the trainer in this process."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from m6.config.run import RunConfig, load_config
from m6.files import write_text
from m6.runs.directory import RunDirectory
from m6.runs.processes import Runtime
from m6.training.loop import pretrain

ROOT = Path(__file__).resolve().parents[2]


class ResultTable:
    """A CSV with one row per finished run; a row is whole or not there.

    Args:
        path: the CSV; made by the first row.
        key: the columns that identify a run.
    """

    def __init__(self, path: Path, key: Sequence[str]) -> None:
        self.path, self.key = path, tuple(key)

    def rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def holds(self, run: Mapping[str, Any]) -> bool:
        """Whether the run with these values of the key columns is finished."""
        wanted = [str(run[name]) for name in self.key]
        return any([row[name] for name in self.key] == wanted for row in self.rows())

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds a row; its columns must be those of the rows before."""
        rows = [*self.rows(), {name: str(value) for name, value in row.items()}]
        if list(rows[0]) != list(rows[-1]):
            raise ValueError(f"{self.path} has the columns {list(rows[0])}, the new row {list(rows[-1])}")
        text = io.StringIO()
        writer = csv.DictWriter(text, list(row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())


def train(config_file: Path, overrides: Sequence[str], run_dir: Path, runtime: Runtime) -> tuple[RunConfig, list[Any]]:
    """Trains a configuration from the start, in this process and with the trainer of ``m6 pretrain``.

    Args:
        overrides: as those of ``m6 pretrain --set``.
        run_dir: what it holds is removed; afterwards it is the run's folder without its checkpoints.

    Returns:
        The run's configuration, and the lines of its metrics.jsonl.

    Raises:
        SystemExit: a signal ended the run before its last step.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    config = load_config(config_file, tuple(overrides))
    if not pretrain(config, run_dir, runtime):
        raise SystemExit(f"stopped by a signal in {run_dir.name}")
    run = RunDirectory(run_dir)
    shutil.rmtree(run.checkpoints)
    return config, run.read_metrics()


def train_on_ranks(config: RunConfig, runtime: Runtime) -> list[Any]:
    """Trains a configuration on all ranks in a temporary folder, which is removed.

    Returns:
        The lines of its metrics.jsonl on the main rank; none on the others.

    Raises:
        SystemExit: a signal ended the run before its last step.
    """
    folders = [tempfile.mkdtemp()] if runtime.is_main else [""]
    dist.broadcast_object_list(folders, src=0)
    run = RunDirectory(Path(folders[0]) / "run")
    if not pretrain(config, run.root, runtime):
        raise SystemExit(f"stopped by a signal in {run.root}")
    lines: list[Any] = []
    if runtime.is_main:
        lines = run.read_metrics()
        shutil.rmtree(run.root.parent)
    dist.barrier()
    return lines


def code_version() -> str:
    """The commit of the working tree, with ``+`` when tracked files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout

    return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if git("diff", "HEAD", "--stat") else "")
