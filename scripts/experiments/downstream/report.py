"""Puts the scores of all fine-tuned runs together, in two files beside this script.

``python report.py FOLDER`` writes ``results.csv`` and ``report.md``; ``python report.py FOLDER _large`` writes
``results_large.csv`` and ``report_large.md``.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from m6.evaluation.downstream import THIS_MODEL
from m6.evaluation.metrics import Estimate
from m6.files import write_text
from m6.formatting import markdown_table

HERE = Path(__file__).resolve().parent
STARTS = ("pretrained", "scratch")
COLUMNS = ["task", "source", "rows", "start", "seed", "system", "metric", "value", "low", "high", "is_share"]


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Returns one record for each metric of each system of each run ``folder/TASK/START-SEED``."""
    records = []
    for file in sorted(folder.glob("*/*/downstream.json")):
        start, _, seed = file.parent.name.partition("-")
        for table in json.loads(file.read_text(encoding="utf-8")):
            for system, scores in table["scores"].items():
                for metric, estimate in scores.items():
                    run = {"task": file.parent.parent.name, "source": table["source"], "rows": table["rows"]}
                    names = {"start": start, "seed": int(seed), "system": system, "metric": metric}
                    records.append(run | names | estimate)
    return records


def describe(records: list[dict[str, Any]]) -> str:
    """Returns a table of one line for each metric: the model from both starts, and the baselines."""
    metrics: dict[tuple[str, str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        metrics[record["task"], record["source"], record["rows"], record["metric"]].append(record)
    lines = []
    for (task, source, rows, metric), own in metrics.items():
        models = [_over_seeds([r for r in own if r["system"] == THIS_MODEL and r["start"] == s]) for s in STARTS]
        # A baseline is the same beside every run.
        baselines = {r["system"]: str(_estimate(r)) for r in own if r["system"] != THIS_MODEL}
        others = "; ".join(f"{name} {text}" for name, text in baselines.items())
        lines.append([task, f"{source}, {rows:,}", metric, *models, others])
    header = ["task", "test rows", "metric", "pretrained", "from scratch", "baselines"]
    return markdown_table(header, lines, align="lllrrl")


def _over_seeds(runs: list[dict[str, Any]]) -> str:
    """The mean and the extremes over seeds; of a single run its interval over the test rows."""
    if not runs:
        return ""
    if len(runs) == 1:
        return str(_estimate(runs[0]))
    values = [run["value"] for run in runs]
    mean = Estimate(statistics.mean(values), min(values), max(values), runs[0]["is_share"])
    return f"{mean}, {len(runs)} seeds"


def _estimate(record: dict[str, Any]) -> Estimate:
    return Estimate(record["value"], record["low"], record["high"], record["is_share"])


def main(folder: Path, suffix: str = "") -> None:
    """Reads the runs in ``folder`` and writes both files; ``suffix`` ends their names."""
    records = read_runs(folder)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    write_text(HERE / f"results{suffix}.csv", text.getvalue())
    note = (
        "In brackets: of one run the 95 % confidence interval over the test rows; of several the least and greatest of "
        "the seeds."
    )
    write_text(HERE / f"report{suffix}.md", f"# Downstream tasks\n\n{describe(records)}\n\n{note}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
