"""The learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math
from typing import Any

from m6.config.run import RunConfig
from m6.config.sections import ScheduleSettings

NEXT_RATE = "next_learning_rate"
"""The key of a checkpoint's state with the schedule's learning rate for the next step."""


def scheduled_rate(step: int, config: RunConfig) -> float:
    """Returns the schedule's learning rate of optimizer step ``step`` (the first is 0)."""
    peak: float = config.deepspeed.optimizer_params["lr"]
    return peak * learning_rate_factor(step, config.m6.training.total_steps, config.m6.schedule)


def changed_rate(config: RunConfig, state: dict[str, Any]) -> str | None:
    """Returns a warning if the learning rate of a resumed run differs from the checkpoint's schedule, else None."""
    step, before = state["step"], state.get(NEXT_RATE)
    rate = scheduled_rate(step, config)
    if before is None or math.isclose(rate, before, rel_tol=1e-9):
        return None
    return (
        f"warning: the learning rate goes on at {rate:.4g}; with the settings of the checkpoint it would be "
        f"{before:.4g}. m6.training.total_steps, m6.schedule or optimizer.params.lr has changed"
    )


def learning_rate_factor(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """Returns the learning rate of optimizer step ``step`` (the first is 0), divided by its peak.

    A linear warm-up is followed by ``constant``, ``cosine``, ``polynomial`` or ``wsd``. ``wsd`` is warm-up, stable,
    decay (Hu et al. 2024, arXiv 2404.06395) with a linear decay.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps  # not from 0: the first step would be wasted
    if settings.decay == "constant":
        return 1.0
    decay_steps = settings.decay_steps(total_steps)
    # wsd stays at the peak before ``begin``; for the other shapes ``begin`` is the end of the warm-up.
    begin = total_steps - decay_steps
    # decay_steps - 1: the last step of the run has exactly the final learning rate.
    progress = min(1.0, max(0.0, (step - begin) / max(1, decay_steps - 1)))
    floor = settings.final_lr_ratio
    if settings.decay == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif settings.decay == "polynomial":
        shape = (1.0 - progress) ** settings.power
    else:
        shape = 1.0 - progress
    return floor + (1.0 - floor) * shape
