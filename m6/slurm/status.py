"""The status of a run, from its folder and from Slurm's queue."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from m6.architecture.settings import MODEL_TYPE
from m6.checkpoints.discovery import complete_checkpoints
from m6.errors import UserError
from m6.files import parse_object, read_note
from m6.runs.directory import PROGRESS, RunDirectory
from m6.runs.layouts import measured_steps, read_layouts


def describe_status(root: Path) -> str:
    """Describes a run in one line each for state, jobs, attempts, step, loss, speed, checkpoint and disk.

    Raises:
        UserError: the folder holds no run.
    """
    run = RunDirectory(root)
    if not (root / "slurm").is_dir() and not (root / "config.json").is_file():
        raise UserError(f"{root}: holds no run")
    if _read_json(root / "config.json").get("model_type") == MODEL_TYPE:
        raise UserError(f"{root}: holds an exported model; expected the folder of a run")
    lines = [("run", os.path.abspath(root)), ("state", _state(root))]
    if (root / "slurm").is_dir():  # otherwise it has never been submitted
        lines.append(("jobs", _jobs(root)))
    folders = (root / "slurm" / "attempts").glob("*")
    attempts = sorted(folder for folder in folders if re.fullmatch("[0-9]{4,9}", folder.name))
    if attempts:
        lines.append(("attempts", f"{len(attempts)}, the last in {attempts[-1]}"))
    lines += [("layout", layout) for layout in _layouts(root)]
    progress = _read_json(root / PROGRESS)
    if all(isinstance(progress.get(key), (int, float)) for key in ("time", "step", "total_steps")):
        age = _age(time.time() - progress["time"])
        lines.append(("step", f"{progress['step']} of {progress['total_steps']}, {age} ago"))
    # metrics.jsonl also has lines of validation, without a training loss.
    entries = [entry for entry in run.read_metrics() if "loss" in entry] if run.metrics.exists() else []
    if entries:
        last = entries[-1]
        loss = "not finite" if last["loss"] is None else f"{last['loss']:.4f}"
        lines.append(("loss", f"{loss} at step {last['step']}"))
        lines.append(("speed", f"{last['tokens_per_second']:,.0f} tokens/s, {last['step_time_s']:.3f} s/step"))
    checkpoints = complete_checkpoints(run.checkpoints)
    if checkpoints:
        age = _age(time.time() - (checkpoints[-1] / "manifest.json").stat().st_mtime)
        lines.append(("checkpoint", f"step {int(checkpoints[-1].name.removeprefix('step_'))}, {age} ago"))
    disk = shutil.disk_usage(root)
    lines.append(("disk", f"{disk.free / 2**30:,.1f} GiB free of {disk.total / 2**30:,.1f}"))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def _layouts(root: Path) -> list[str]:
    """The layouts of a run on changing nodes, the oldest first."""
    records = read_layouts(root)
    described = []
    for record, measured in zip(records, measured_steps(root, records), strict=True):
        outcome = "failed" if record.failed else "not measured" if measured is None else f"{measured:.3g} measured"
        described.append(
            f"from step {record.step}, {record.nodes} of {record.available} nodes: {record.description}: "
            f"{record.predicted_s:.3g} s a step predicted, {outcome} ({record.reason})"
        )
    return described


def _state(root: Path) -> str:
    # The job scripts and users mark a run with these files; the most final one decides.
    for name, meaning in (("FATAL", "failed"), ("DONE", "finished at step"), ("STOP", "stop requested by a user")):
        if (root / name).exists():
            return f"{meaning} {read_note(root / name)}".strip()
    return "not finished"


def _jobs(root: Path) -> str:
    """Returns the queued and running jobs of this run.

    A job of this run has the run's folder as its comment. The job of the last attempt counts without a comment, too,
    since a user may have submitted it by hand.
    """
    last = root / "slurm" / "job"
    last_job = read_note(last) if last.exists() else ""
    # id | state | reason | nodes | time left | comment; the comment is last, because it may contain a bar.
    try:
        queue = subprocess.run(
            ["squeue", "--noheader", "--format=%i|%T|%r|%D|%L|%k"], capture_output=True, text=True, timeout=60
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return "unknown: squeue is not available"
    if queue.returncode:
        return "unknown: squeue does not answer"  # its own message would be about a missing configuration
    jobs = []
    for line in queue.stdout.splitlines():
        job, state, reason, nodes, left, comment = line.strip().split("|", 5)
        if job == last_job or comment == os.path.abspath(root):
            detail = f"{nodes} nodes, {left} left" if state == "RUNNING" else reason
            jobs.append(f"{job} {state} ({detail})")
    return "; ".join(jobs) or "none in the queue"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse_object(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
