"""A scaling law of the loss: its form, its fit to finished runs, and its predictions for a run and for days of work."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from scipy.optimize import least_squares

from m6.architecture.settings import ModelSettings
from m6.config.run import RunConfig
from m6.errors import UserError
from m6.formatting import markdown_table
from m6.model.parameters import num_parameters
from m6.shipped import CONFIGS
from m6.validation import Section, read_model

INTERVAL = 0.95
_Z = 1.96


@dataclass(frozen=True)
class Scale:
    """The variables of the law.

    Attributes:
        parameters: N, active parameters of a token, without embeddings and the patch encoder.
        expansion: X, experts over active experts of a token; 1 for a dense model.
        tokens: D, tokens of the training, without padding.
    """

    parameters: float
    expansion: float
    tokens: float

    @classmethod
    def of(cls, model: ModelSettings, tokens: float, experts_per_token: float | None = None) -> Scale:
        """The scale of a model trained on ``tokens`` tokens.

        Args:
            experts_per_token: see ``num_parameters``; None: all chosen experts of a token, as without a capacity.
        """
        counts = num_parameters(model, experts_per_token=experts_per_token)
        active = counts["active_per_token"] - counts["embeddings"] - counts["patch_encoder"]
        if model.moe is None:
            return cls(active, 1.0, tokens)
        moe = model.moe_config()
        return cls(active, moe.num_experts / (experts_per_token or moe.experts_per_token), tokens)

    @property
    def flops(self) -> float:
        """C = 6 N D (Kaplan et al., arXiv 2001.08361)."""
        return 6 * self.parameters * self.tokens


class Coefficients(Section):
    """L = floor + (a (N X^gamma)^-alpha + b D^-beta)^kappa, with N and D in millions.

    With kappa 1 it is the law of Hoffmann et al. (arXiv 2203.15556, equation 2). Without a floor it is the law of
    Kaplan et al. (arXiv 2001.08361, equation 1.5): with fewer tokens, parameters matter less. Experts count as more
    parameters, by a power of their number, as in Clark et al. (arXiv 2202.01169, equation 1). Their law is a product of
    powers of both.
    """

    floor: float = Field(ge=0)
    a: float = Field(gt=0)
    alpha: float = Field(gt=0)
    gamma: float = Field(ge=0)
    b: float = Field(gt=0)
    beta: float = Field(gt=0)
    kappa: float = Field(gt=0)

    def loss(self, scale: Scale) -> float:
        """Nats a token."""
        parameters = scale.parameters / 1e6 * scale.expansion**self.gamma
        shortage = self.a * parameters**-self.alpha + self.b * (scale.tokens / 1e6) ** -self.beta
        return self.floor + shortage**self.kappa


class Recipe(Section):
    """The training recipe of the fitted runs. Another recipe has another law.

    Attributes:
        optimizer: of the matrices, and of the experts if they have another.
        decay: of the learning rate.
        positions: "rotary" or "learned".
    """

    optimizer: str
    decay: str
    positions: str

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.decay} and {self.positions} positions"


class Range(Section):
    """Smallest and largest value of the fitted runs."""

    low: float = Field(gt=0)
    high: float = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        return self


@dataclass(frozen=True)
class LossPrediction:
    """A loss in nats a token with its interval, and the variables outside of the range of the fitted runs.

    Attributes:
        loss: by the fit.
        low, high: the interval.
        beyond: name -> factor by which the value is above the largest or below the smallest of the fitted runs.
    """

    loss: float
    low: float
    high: float
    beyond: dict[str, float]

    def __str__(self) -> str:
        return f"{self.loss:.2f} ({self.low:.2f} to {self.high:.2f})"


class ScalingLaw(Section):
    """A fitted law.

    Attributes:
        origin: the description of its runs.
        measure: the meaning of the loss.
        recipe: of the runs.
        runs: number of fitted runs.
        parameters, expansion, tokens: ranges of the runs, in the units of :class:`Scale`.
        fill: share of the runs' positions with tokens; the others were padding.
        fit: of all runs.
        resampled: of runs drawn with replacement (bootstrap).
        residual: standard deviation of log(measured / fitted) over the runs.
    """

    origin: str
    measure: str
    recipe: Recipe
    runs: int = Field(gt=0)
    parameters: Range
    expansion: Range
    tokens: Range
    fill: float = Field(gt=0, le=1)
    fit: Coefficients
    resampled: list[Coefficients] = Field(min_length=1)
    residual: float = Field(ge=0)

    def predict(self, scale: Scale) -> LossPrediction:
        """The loss with a 95 % interval: spread of the resampled fits, and residuals of single runs."""
        loss = self.fit.loss(scale)
        tails = (1 - INTERVAL) / 2
        fits = np.quantile([other.loss(scale) for other in self.resampled], [tails, 1 - tails])
        below, above = (
            math.hypot(max(sign * math.log(bound / loss), 0.0), _Z * self.residual)
            for sign, bound in zip((-1, 1), fits, strict=True)
        )
        return LossPrediction(loss, loss * math.exp(-below), loss * math.exp(above), self.beyond(scale))

    def beyond(self, scale: Scale) -> dict[str, float]:
        """The variables of ``scale`` outside of the range of the fitted runs, with their factors."""
        found = {}
        for name in ("parameters", "expansion", "tokens"):
            value, covered = getattr(scale, name), getattr(self, name)
            factor = max(value / covered.high, covered.low / value)
            if factor > 1:
                found[name] = factor
        return found


Array = NDArray[np.float64]
_HUBER = 0.01
"""Relative errors beyond this count linearly, so a failed run does not bend the law."""


def fit(scales: Sequence[Scale], losses: Sequence[float], start: Coefficients | None = None) -> Coefficients:
    """The law with the least relative errors, by a Huber loss as in Hoffmann et al. (arXiv 2203.15556, equation 3).

    Args:
        scales: of the runs.
        losses: of the same runs, in nats a token.
        start: of the search; None: a grid of starts, and the best result counts.

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
    """The law of these runs, with ``resamples`` further fits to runs drawn with replacement.

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
    """The start of a search: the terms of one million parameters and of one million tokens are equal."""
    half = np.log(rest) / kappa - np.log(2)
    return np.array([np.log(floor), half, alpha, 0.3, half, beta, kappa])


def _vector(law: Coefficients) -> Array:
    return np.array([np.log(law.floor), np.log(law.a), law.alpha, law.gamma, np.log(law.b), law.beta, law.kappa])


_DAY_S = 86400.0
_PARTS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the days of :func:`learned_by_days`."""


@functools.cache
def shipped_law() -> ScalingLaw:
    """The law of configs/scaling/law.json, written by scripts/experiments/recipe/fit.py."""
    return read_model(ScalingLaw, CONFIGS / "scaling" / "law.json")


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe of a run, in the names of the law."""
    optimizer, store = config.deepspeed.optimizer_type, config.expert_store
    of_experts = None if store is None else store.optimizer
    if of_experts is not None and of_experts.type != optimizer:
        optimizer += f" ({of_experts.type} for experts)"
    positions = "rotary" if config.model.rotary_base else "learned"
    return Recipe(optimizer=optimizer, decay=config.m6.schedule.decay, positions=positions)


def predicted_loss(config: RunConfig, steps: float, experts_per_token: float | None = None) -> LossPrediction:
    """The loss of the run's model after ``steps`` steps, with the share of padding of the law's runs.

    Args:
        experts_per_token: experts of a token within the capacity; None: the expectation for the run's own micro-batch.
    """
    law, expected = shipped_law(), config.expected_routing
    if experts_per_token is None and expected is not None:
        experts_per_token = expected.experts_per_token
    positions = steps * config.deepspeed.train_batch_size * config.m6.data.sequence_length
    return law.predict(Scale.of(config.model, law.fill * positions, experts_per_token))


def loss_document(prediction: LossPrediction) -> dict[str, Any]:
    """For ``--json``: the loss, its interval, and the factors by which the run exceeds the range of the law's runs."""
    return {
        "measure": shipped_law().measure,
        "recipe": shipped_law().recipe.model_dump(),
        "loss": prediction.loss,
        "range": [prediction.low, prediction.high],
        "extrapolated": prediction.beyond,
    }


def loss_line(prediction: LossPrediction, config: RunConfig) -> str:
    """The same as a sentence."""
    law, own = shipped_law(), recipe_of(config)
    line = (
        f"Predicted {law.measure}: {prediction}, for the law's data and tokenizer, "
        f"{law.fill:.0%} of the positions with tokens, and {law.recipe}"
    )
    if own != law.recipe:
        line += f", which are not this run's ({own})"
    if not prediction.beyond:
        return f"{line} ({law.origin}, {law.runs} runs)."
    factors = ", ".join(f"{name} {_factor(factor)}" for name, factor in prediction.beyond.items())
    return f"{line}; an **extrapolation** beyond the {law.runs} runs of {law.origin}: {factors}."


def learned_by_days(config: RunConfig, step_s: dict[int, float], days: float) -> dict[int, list[tuple[float, float]]]:
    """(days, loss) by number of devices, for parts of ``days`` with at least one step.

    Args:
        step_s: seconds of a step by number of devices.
        days: the longest time.

    Raises:
        UserError: no step ends within ``days``.
    """
    found = {}
    for devices, seconds in step_s.items():
        steps = {part * days: part * days * _DAY_S / seconds for part in _PARTS}
        points = [(time, predicted_loss(config, number).loss) for time, number in steps.items() if number >= 1]
        if points:
            found[devices] = points
    if not found:
        raise UserError(f"--days {days:g}: no step ends within it; the fastest takes {min(step_s.values()):,.0f} s")
    return found


def days_table(curves: dict[int, list[tuple[float, float]]], days: float) -> str:
    """Loss by number of devices and days."""
    times = [part * days for part in _PARTS]
    rows = [
        [str(devices), *(f"{losses[time]:.3f}" if time in losses else "" for time in times)]
        for devices, losses in ((devices, dict(points)) for devices, points in curves.items())
    ]
    columns = ["devices", *(f"after {time:g} days" for time in times)]
    return markdown_table(columns, rows, "r" * len(columns))


def _factor(factor: float) -> str:
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2g} times"
