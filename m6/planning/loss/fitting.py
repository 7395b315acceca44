"""Fits a scaling law to the losses of finished runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from m6.planning.loss.law import Coefficients, Range, Recipe, Scale, ScalingLaw

Array = NDArray[np.float64]

_HUBER = 0.01
"""Relative errors beyond this count linearly, so that a run that went wrong does not bend the law."""


def fit(scales: Sequence[Scale], losses: Sequence[float], start: Coefficients | None = None) -> Coefficients:
    """The law with the least relative errors, by a Huber loss as in Hoffmann et al. (arXiv 2203.15556, equation 3).

    Args:
        scales: of the runs.
        losses: of the same runs, in nats a token.
        start: of the search; None: a grid of starts, of which the best result counts.

    Raises:
        ValueError: fewer runs than coefficients.
    """
    if len(scales) != len(losses) or len(scales) < len(Coefficients.model_fields):
        raise ValueError(
            f"{len(scales)} runs with {len(losses)} losses; a law has {len(Coefficients.model_fields)} coefficients"
        )
    parameters = np.log([scale.parameters / 1e6 for scale in scales])
    expansion = np.log([scale.expansion for scale in scales])
    tokens = np.log([scale.tokens / 1e6 for scale in scales])
    target = np.log(np.asarray(losses))

    def residuals(x: Array) -> Array:
        log_floor, log_a, alpha, gamma, log_b, beta, kappa = x
        shortage = np.logaddexp(log_a - alpha * (parameters + gamma * expansion), log_b - beta * tokens)
        return np.asarray(np.logaddexp(np.full_like(target, log_floor), kappa * shortage) - target)

    least = float(min(losses))
    starts = (
        [_vector(start)]
        if start is not None
        else [
            _start(share * least, (1 - share) * least, alpha, beta, kappa)
            for share, alpha, beta, kappa in itertools.product(
                (0.1, 0.5, 0.9), (0.1, 0.3, 0.8), (0.1, 0.3, 0.8), (0.3, 1)
            )
        ]
    )
    lowest = [np.log(1e-3), np.log(1e-4), 1e-3, 0.0, np.log(1e-4), 1e-3, 0.1]
    highest = [np.log(least), np.log(1e6), 3.0, 2.0, np.log(1e6), 3.0, 2.0]
    results = [
        least_squares(residuals, np.clip(x, lowest, highest), bounds=(lowest, highest), loss="huber", f_scale=_HUBER)
        for x in starts
    ]
    best = min(results, key=lambda result: float(result.cost)).x
    floor, a, b = np.exp(best[[0, 1, 4]])
    return Coefficients(floor=floor, a=a, alpha=best[2], gamma=best[3], b=b, beta=best[5], kappa=best[6])


def fit_law(
    scales: Sequence[Scale],
    losses: Sequence[float],
    fill: float,
    origin: str,
    measure: str,
    recipe: Recipe,
    resamples: int = 200,
    seed: int = 0,
) -> ScalingLaw:
    """The law of these runs, with fits of ``resamples`` draws of them with replacement.

    Args:
        scales, losses: as in :func:`fit`.
        fill, origin, measure, recipe: as in :class:`ScalingLaw`.
    """
    best = fit(scales, losses)
    random, number = np.random.default_rng(seed), len(scales)
    resampled = []
    for _ in range(resamples):
        drawn = random.integers(0, number, number)
        resampled.append(fit([scales[i] for i in drawn], [losses[i] for i in drawn], best))
    errors = [np.log(loss / best.loss(scale)) for scale, loss in zip(scales, losses, strict=True)]
    degrees = max(number - len(Coefficients.model_fields), 1)

    def covered(values: Sequence[float]) -> Range:
        return Range(low=min(values), high=max(values))

    return ScalingLaw(
        origin=origin,
        measure=measure,
        recipe=recipe,
        runs=number,
        parameters=covered([scale.parameters for scale in scales]),
        expansion=covered([scale.expansion for scale in scales]),
        tokens=covered([scale.tokens for scale in scales]),
        fill=fill,
        fit=best,
        resampled=resampled,
        residual=float(np.sqrt(np.sum(np.square(errors)) / degrees)),
    )


def _start(floor: float, rest: float, alpha: float, beta: float, kappa: float) -> Array:
    """Where a search begins: one million parameters and one million tokens lack as much."""
    half = np.log(rest) / kappa - np.log(2)
    return np.array([np.log(floor), half, alpha, 0.3, half, beta, kappa])


def _vector(law: Coefficients) -> Array:
    return np.array([np.log(law.floor), np.log(law.a), law.alpha, law.gamma, np.log(law.b), law.beta, law.kappa])
