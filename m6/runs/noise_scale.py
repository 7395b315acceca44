"""The gradient noise scale of a run, from its metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def noise_scale(entries: Iterable[dict[str, Any]]) -> float | None:
    """The noise scale in samples: a ratio of means over lines, see ``m6.training.reporting.noise``.

    Args:
        entries: lines of metrics.jsonl.

    Returns:
        None without estimates, or if the estimate of the squared gradient is not positive: noise hides it.
    """
    found = [entry["gradient_noise"] for entry in entries if "gradient_noise" in entry]
    squared_gradient = sum(entry["squared_gradient"] for entry in found)
    return sum(entry["variance"] for entry in found) / squared_gradient if squared_gradient > 0 else None
