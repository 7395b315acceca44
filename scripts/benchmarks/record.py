"""What every benchmark writes: a JSON with all numbers, and a Markdown page with the ones to read."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m6.files import write_json, write_text
from m6.formatting import markdown_table
from m6.runs.processes import default_device
from m6.runs.provenance import hardware

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("torch", "deepspeed", "transformers")


class Recorder:
    """Collects the circumstances when it is made, so that the load is that of the machine without the benchmark."""

    def __init__(self, name: str, title: str) -> None:
        self._name, self._title = name, title
        script = Path(sys.argv[0]).resolve().relative_to(ROOT)
        self.circumstances: dict[str, Any] = {
            # A path into this repository stands as in the README, whatever folder the repository lies in.
            "command": shlex.join(["python", str(script), *sys.argv[1:]]).replace(f"{ROOT}/", ""),
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "hardware": hardware(default_device()),
            "threads": torch.get_num_threads(),
            "load_average_before": round(os.getloadavg()[0], 2),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        }

    def write(self, header: Sequence[str], rows: Sequence[Sequence[str]], notes: str, numbers: dict[str, Any]) -> None:
        """Writes ``results/NAME.json`` with ``numbers``, and ``results/NAME.md`` with the table and the notes."""
        facts = self.circumstances
        versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
        lines = [
            f"# {self._title}",
            "",
            f"- command: `{facts['command']}`",
            f"- date: {facts['date']}",
            f"- hardware: {facts['hardware']}; {facts['threads']} threads; load average before the start "
            f"{facts['load_average_before']}",
            f"- versions: {versions}",
            "",
            markdown_table(header, rows, "l" * len(header)),
            "",
            notes,
        ]
        write_json(RESULTS / f"{self._name}.json", {**facts, **numbers})
        write_text(RESULTS / f"{self._name}.md", "\n".join(lines) + "\n")
        print("\n".join(lines))


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The median, with the 10th and 90th percentile."""
    low, middle, high = np.percentile(values, [10, 50, 90])
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"
