"""How good predictions were, and factors that would have made them better."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m6.planning.profile import PARTS, Part

_PRIOR_WEIGHT = 0.003
_BOUNDS = (0.05, 20.0)
_ROUNDS = 2000


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Pairs in the same order less pairs in the other, over all pairs; ties count as neither."""
    pairs = list(itertools.combinations(range(len(predicted)), 2))
    if not pairs:
        return 0.0
    signs = [np.sign((predicted[a] - predicted[b]) * (measured[a] - measured[b])) for a, b in pairs]
    return float(sum(signs)) / len(pairs)


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """By which share the choice that looked best is slower than the best."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def fit_factors(parts: Sequence[dict[str, float]], measured: Sequence[float]) -> dict[Part, float]:
    """Factors of the parts that bring their sums nearest to what was measured.

    Least squares of relative errors with a pull of each factor to 1, so that a part that the runs do not tell apart
    keeps its own; by coordinate descent within bounds.

    Args:
        parts: seconds by part of every run, predicted with factors of 1; parts without a factor stay.
        measured: seconds of every run.
    """
    target = np.asarray(measured)
    columns = np.array([[run.get(part, 0.0) for part in PARTS] for run in parts]) / target[:, None]
    others = np.array([sum(s for name, s in run.items() if name not in PARTS) for run in parts]) / target
    factors: NDArray[np.float64] = np.ones(len(PARTS))
    for _ in range(_ROUNDS):
        before = factors.copy()
        for index in range(len(PARTS)):
            column = columns[:, index]
            rest = 1 - others - columns @ factors + column * factors[index]
            best = (column @ rest + _PRIOR_WEIGHT) / (column @ column + _PRIOR_WEIGHT)
            factors[index] = np.clip(best, *_BOUNDS)
        if np.abs(factors - before).max() < 1e-9:
            break
    return {part: float(factor) for part, factor in zip(PARTS, factors, strict=True)}


def fit_memory(
    states: Sequence[float], activations: Sequence[float], measured: Sequence[float], constant: float
) -> tuple[float, float]:
    """(bytes of the process itself, bytes held for each byte of activations) that come nearest to what was measured.

    Least squares of relative errors with a pull to ``constant`` and 1, by which few runs move little.

    Args:
        states: predicted bytes of every run beside activations and the process.
        activations: predicted bytes of activations.
        measured: bytes of every run.
        constant: of the process, as calibrated.
    """
    scale = 1 / np.asarray(measured)
    unit = max(constant, 1.0)
    rows = np.stack([unit * scale, np.asarray(activations) * scale], axis=1)
    rows = np.concatenate([rows, _PRIOR_WEIGHT**0.5 * np.eye(2)])
    target = np.concatenate([1 - np.asarray(states) * scale, _PRIOR_WEIGHT**0.5 * np.ones(2)])
    own, factor = np.linalg.lstsq(rows, target, rcond=None)[0]
    return float(own) * unit, float(np.clip(factor, *_BOUNDS))
