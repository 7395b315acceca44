"""Scores of predictions against measurements, and factors that are fitted to measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from m6.planning.machine.profile import STEP_PARTS, StepPart

# Weight of the pull of every factor to 1 (ridge regression); it decides where runs cannot tell two factors apart.
_PRIOR_WEIGHT = 0.003
_BOUNDS = (0.05, 20.0)
_ROUNDS = 2000


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's rank correlation: (concordant - discordant pairs) / all pairs; 1 is the same order, -1 the reverse."""
    pairs = list(itertools.combinations(range(len(predicted)), 2))
    if not pairs:
        return 0.0
    signs = [np.sign((predicted[a] - predicted[b]) * (measured[a] - measured[b])) for a, b in pairs]
    return float(sum(signs)) / len(pairs)


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower the choice with the least prediction is than the best choice, as a share of the latter."""
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def fit_factors(parts: Sequence[dict[str, float]], measured: Sequence[float]) -> dict[StepPart, float]:
    """The factor of each part of a step that fits the measured steps best.

    Least squares of relative errors with a pull of each factor to 1, by coordinate descent within bounds.

    Args:
        parts: predicted seconds of each run by part, without factors; a part that has no factor is left as it is.
        measured: seconds of a step of each run.
    """
    target = np.asarray(measured)
    columns = np.array([[run.get(part, 0.0) for part in STEP_PARTS] for run in parts]) / target[:, None]
    others = np.array([sum(s for name, s in run.items() if name not in STEP_PARTS) for run in parts]) / target
    factors: NDArray[np.float64] = np.ones(len(STEP_PARTS))
    for _ in range(_ROUNDS):
        before = factors.copy()
        for index in range(len(STEP_PARTS)):
            column = columns[:, index]
            rest = 1 - others - columns @ factors + column * factors[index]
            best = (column @ rest + _PRIOR_WEIGHT) / (column @ column + _PRIOR_WEIGHT)
            factors[index] = np.clip(best, *_BOUNDS)
        if np.abs(factors - before).max() < 1e-9:
            break
    return {part: float(factor) for part, factor in zip(STEP_PARTS, factors, strict=True)}


def fit_memory(
    states: Sequence[float], activations: Sequence[float], measured: Sequence[float], constant: float
) -> tuple[float, float]:
    """(bytes of the process without tensors, bytes held for each byte of activations) that fit the measurements best.

    Least squares of relative errors with a pull to ``constant`` and to 1, so that few runs change little.

    Args:
        states: predicted bytes of each run without activations and process.
        activations: predicted bytes of activations of each run.
        measured: bytes of each run.
        constant: calibrated bytes of the process.
    """
    scale = 1 / np.asarray(measured)
    unit = max(constant, 1.0)
    rows = np.stack([unit * scale, np.asarray(activations) * scale], axis=1)
    rows = np.concatenate([rows, _PRIOR_WEIGHT**0.5 * np.eye(2)])
    target = np.concatenate([1 - np.asarray(states) * scale, _PRIOR_WEIGHT**0.5 * np.ones(2)])
    own, factor = np.linalg.lstsq(rows, target, rcond=None)[0]
    return float(own) * unit, float(np.clip(factor, *_BOUNDS))
