"""The loss that the shipped law predicts for a run, and for what a run has seen after so many days."""

from __future__ import annotations

import functools
from typing import Any

from m6.config.run import RunConfig
from m6.errors import UserError
from m6.formatting import markdown_table
from m6.planning.loss.law import LossPrediction, Recipe, Scale, ScalingLaw
from m6.shipped import CONFIGS
from m6.validation import read_model

_DAY_S = 86400.0
_PARTS = (0.125, 0.25, 0.5, 1.0)
"""Of the days that :func:`learned_by_days` asks about."""


@functools.cache
def shipped_law() -> ScalingLaw:
    """The law of configs/scaling/law.json, which scripts/experiments/recipe/fit.py writes."""
    return read_model(ScalingLaw, CONFIGS / "scaling" / "law.json")


def recipe_of(config: RunConfig) -> Recipe:
    """What a run trains with, as the law names it."""
    optimizer, store = config.deepspeed.optimizer_type, config.expert_store
    of_experts = None if store is None else store.optimizer
    if of_experts is not None and of_experts.type != optimizer:
        optimizer += f" ({of_experts.type} for experts)"
    positions = "rotary" if config.model.rotary_base else "learned"
    return Recipe(optimizer=optimizer, decay=config.m6.schedule.decay, positions=positions)


def predicted_loss(config: RunConfig, steps: float, experts_per_token: float | None = None) -> LossPrediction:
    """The loss of the run's model after so many steps, with the share of padding that the law's runs had.

    Args:
        experts_per_token: what the capacity leaves over; None: what is expected of the run's own micro-batch.
    """
    law, expected = shipped_law(), config.expected_routing
    if experts_per_token is None and expected is not None:
        experts_per_token = expected.experts_per_token
    positions = steps * config.deepspeed.train_batch_size * config.m6.data.sequence_length
    return law.predict(Scale.of(config.model, law.fill * positions, experts_per_token))


def loss_document(prediction: LossPrediction) -> dict[str, Any]:
    """For ``--json``: the loss, its interval, and by which factor the run is outside of the law's runs."""
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
    """(days, loss) by number of devices, for parts of ``days`` in which at least one step ends.

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
