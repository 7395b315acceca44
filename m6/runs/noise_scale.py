"""The gradient noise scale of a run, from its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def noise_scale(entries: Iterable[dict[str, Any]]) -> float | None:
    """The noise scale in samples, as ``m6.training.reporting.noise`` explains it: a ratio of means over lines.

    Args:
        entries: lines of metrics.jsonl.

    Returns:
        None without estimates, or if noise covers the gradient.
    """
    found = [entry["gradient_noise"] for entry in entries if "gradient_noise" in entry]
    squared_gradient = sum(entry["squared_gradient"] for entry in found)
    return sum(entry["variance"] for entry in found) / squared_gradient if squared_gradient > 0 else None
