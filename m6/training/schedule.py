"""The learning-rate schedule, a pure function of the step."""

from __future__ import annotations

import math

from m6.config.sections import ScheduleSettings


def learning_rate_factor(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """The learning rate of optimizer step ``step`` (the first is 0), divided by its peak.

    A linear warm-up is followed by ``constant``, ``cosine``, ``polynomial`` or ``wsd``. The latter is warm-up, stable,
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
