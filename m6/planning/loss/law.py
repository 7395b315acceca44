"""A scaling law of the loss: its form, the range of the runs it was fitted to, and its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from m6.architecture.settings import ModelSettings
from m6.model.counting import num_parameters
from m6.validation import Section

INTERVAL = 0.95
_Z = 1.96


@dataclass(frozen=True)
class Scale:
    """What the law predicts from.

    Attributes:
        parameters: N, those that compute a token, without embeddings and the network of patches.
        expansion: X, experts over the experts that compute a token; 1 for a dense model.
        tokens: D, trained on, without padding.
    """

    parameters: float
    expansion: float
    tokens: float

    @classmethod
    def of(cls, model: ModelSettings, tokens: float, experts_per_token: float | None = None) -> Scale:
        """The scale of a model that trains on so many tokens.

        Args:
            experts_per_token: see ``num_parameters``; None: all that a token chooses, as without a capacity.
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

    With kappa 1 the sum is that of Hoffmann et al. (arXiv 2203.15556, equation 2); without a floor it is that of Kaplan
    et al. (arXiv 2001.08361, equation 1.5), where parameters matter less the fewer tokens there are. Experts count as
    more parameters, a power of their number, as in Clark et al. (arXiv 2202.01169, equation 1), whose law is a product
    of powers of both.
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
    """What the fitted runs were trained with; another recipe has another law.

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
    """A loss in nats a token with its interval, and what of the scale is outside of the fitted runs.

    Attributes:
        loss: by the fit.
        low, high: the interval.
        beyond: name -> how many times the value is above the largest or below the smallest of the fitted runs.
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
        origin: where its runs are described.
        measure: what the loss is.
        recipe: what the runs were trained with.
        runs: how many it was fitted to.
        parameters, expansion, tokens: ranges of the runs, in the units of :class:`Scale`.
        fill: share of the runs' positions that held tokens; the others were padding.
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
        """Which quantities of ``scale`` are outside of the fitted runs, and by which factor."""
        found = {}
        for name in ("parameters", "expansion", "tokens"):
            value, covered = getattr(scale, name), getattr(self, name)
            factor = max(value / covered.high, covered.low / value)
            if factor > 1:
                found[name] = factor
        return found
