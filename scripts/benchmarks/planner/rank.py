"""One rank of ``m6 pretrain`` with a stopwatch around its steps."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from m6.cli.main import main as cli
from m6.files import write_json
from m6.training import loop
from m6.training.reporting.sums import StepOutcome
from m6.training.train_step import TrainStep

FILE_PAGES = "M6_BENCHMARK_FILE_PAGES"
"""how many bytes of files the process has that the ranks are forked from"""

_steps: list[dict[str, Any]] = []


class TimedStep(TrainStep):
    def __call__(self, *args: Any, **kwargs: Any) -> list[StepOutcome]:
        cpu, wall = time.process_time(), time.perf_counter()
        outcomes = super().__call__(*args, **kwargs)
        entry = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
        resident = resident_bytes()
        resident["RssFile"] = max(resident["RssFile"], int(os.environ[FILE_PAGES]))
        _steps.append({**entry, "memory_bytes": sum(resident.values())})
        return outcomes


def resident_bytes() -> dict[str, int]:
    """Of this process: pages of its own, of files, and shared ones; their sum is what ``m6 pretrain`` reports."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")}


def run_rank(folder: Path, arguments: list[str]) -> None:
    """``m6 ARGUMENTS...``; writes FOLDER/rank_N.json with processor time, time on the wall and resident memory of every
    step."""
    loop.TrainStep = TimedStep  # type: ignore[misc]
    sys.argv = ["m6", *arguments]
    try:
        cli()
    finally:
        write_json(folder / f"rank_{os.environ['RANK']}.json", {"steps": _steps})
