"""Measured values with confidence intervals over the test rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 300


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval.

    Attributes:
        value: the value on all test rows.
        low, high: bounds of the interval; None for a single row, and for exact values.
        is_share: whether the value is a share of the rows, printed in percent.
    """

    value: float
    low: float | None = None
    high: float | None = None
    is_share: bool = False

    def __str__(self) -> str:
        form = "{:.1%}" if self.is_share else "{:.2f}"
        value = form.format(self.value)
        if self.low is None or self.high is None:
            return value
        return f"{value} ({form.format(self.low)} to {form.format(self.high)})"


def share(hits: Sequence[bool] | NDArray[np.bool_]) -> Estimate:
    """Returns the share of hits with Wilson's score interval (JASA 22, 1927), accurate even near 0 and 1."""
    from scipy.stats import binomtest

    interval = binomtest(int(np.sum(hits)), len(hits)).proportion_ci(method="wilson")
    return Estimate(float(np.mean(hits)), float(interval.low), float(interval.high), is_share=True)


def bootstrap(num_rows: int, statistic: Callable[[NDArray[np.int64]], float]) -> Estimate:
    """Returns a statistic of the rows with the percentile interval of RESAMPLES random draws with replacement.

    Args:
        num_rows: number of test rows.
        statistic: maps the indices of rows to a value.
    """
    from scipy.stats import bootstrap as resample

    index = np.arange(num_rows)
    if num_rows < 2:
        return Estimate(float(statistic(index)))
    drawn = resample(
        (index,), statistic, vectorized=False, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return Estimate(float(statistic(index)), float(drawn.low), float(drawn.high))
