"""RUN/slurm/layouts.jsonl: the layouts of a run on changing nodes, why each was chosen, and how fast it was."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from m6.errors import UserError
from m6.files import write_text
from m6.runs.directory import RunDirectory
from m6.validation import describe

LAYOUTS_NAME = "slurm/layouts.jsonl"


class LayoutRecord(BaseModel):
    """The layout of an attempt at its begin.

    Attributes:
        time: when it was chosen, in seconds since 1970.
        step: of the newest checkpoint at that time.
        available: the number of nodes of the job.
        nodes: the number of nodes in the layout.
        layout: the fields of ``m6.planning.cost.layout.ParallelLayout``.
        description: the layout in words.
        reason: why it was chosen.
        predicted_s: predicted seconds of a step.
        parts: these seconds by part, before they are corrected by the run's own measurements.
        failed: whether the attempt failed before its first step.
    """

    model_config = ConfigDict(extra="forbid")

    time: float
    step: int
    available: int
    nodes: int
    layout: dict[str, Any]
    description: str
    reason: str
    predicted_s: float
    parts: dict[str, float]
    failed: bool = False


def read_layouts(run: Path) -> list[LayoutRecord]:
    """Reads the records of a run, the oldest first; empty if it has none.

    Raises:
        UserError: a line is damaged.
    """
    file = run / LAYOUTS_NAME
    if not file.exists():
        return []
    records = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        try:
            records.append(LayoutRecord.model_validate_json(line))
        except ValidationError as error:
            raise UserError(f"{file}, line {number}: {describe(error, LayoutRecord, '')}; remove the line") from None
    return records


def write_layouts(run: Path, records: list[LayoutRecord]) -> None:
    """Replaces the records of a run."""
    lines = [json.dumps(record.model_dump(), ensure_ascii=False) + "\n" for record in records]
    write_text(run / LAYOUTS_NAME, "".join(lines))


def measured_steps(
    run: Path, records: list[LayoutRecord], counts: Callable[[dict[str, Any]], bool] = lambda entry: True
) -> list[float | None]:
    """Returns the median seconds of a step under each record, without waits for data and checkpoints.

    None for a record without a finished interval of steps. The first interval of an attempt includes compilation and
    allocation, so it counts only if it is the only one. Damaged lines of the metrics are left out; the trainer moves
    them to another file.

    Args:
        counts: whether to use the steps of an entry of metrics.jsonl.
    """
    directory = RunDirectory(run)
    entries = directory.read_metrics(skip_damaged=True) if directory.metrics.exists() else []
    steps = [entry for entry in entries if "step_time_s" in entry and counts(entry)]
    found: list[float | None] = []
    for number, record in enumerate(records):
        end = records[number + 1].time if number + 1 < len(records) else float("inf")
        own = [entry for entry in steps if record.time <= entry["time"] < end]
        times = [entry["step_time_s"] - entry["data_wait_s"] - entry["checkpoint_stall_s"] for entry in own]
        found.append(statistics.median(times[1:] or times) if times else None)
    return found
