"""The section ``m6.gradient_delay``: its keys, and what cannot be combined with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from m6.config.deepspeed import DeepSpeedSettings
from m6.errors import UserError
from m6.validation import Section

if TYPE_CHECKING:
    from m6.config.sections import M6Settings

FLUSHLESS: Literal["1f1b"] = "1f1b"
"""The schedule that goes on from step to step without a flush."""
_TOLERANT = ("Adafactor", "Muon")
"""Optimizers that lose less by the delay than AdamW, see scripts/experiments/gradient_delay."""


class GradientDelaySettings(Section):
    """Uses each gradient one step late: W(t+1) = W(t) - lr u(g(W(t-1))) (PipeDream-2BW, arXiv 2006.09503). The host
    then updates offloaded experts beside a whole step, and a pipeline goes on from step to step without a flush. It
    changes what is learned."""

    accept_loss: bool = Field(
        False, description="train although the optimizer learns worse with the delay: AdamW, LAMB, LARS, SGD"
    )


def check_gradient_delay(settings: GradientDelaySettings, run: M6Settings, deepspeed: DeepSpeedSettings) -> None:
    """Raises UserError if the run would learn less from late gradients and does not say so."""
    optimizers = {"optimizer.type": deepspeed.optimizer_type}
    if run.offload is not None and run.offload.optimizer is not None:
        optimizers["m6.offload.optimizer.type"] = run.offload.optimizer.type
    intolerant = {key: name for key, name in optimizers.items() if name not in _TOLERANT}
    if intolerant and not settings.accept_loss:
        key, name = next(iter(intolerant.items()))
        raise UserError(
            f'm6.gradient_delay: {key} "{name}" learns worse from gradients that are one step late: AdamW lost 0.19 '
            "nats in runs of 300 steps (scripts/experiments/gradient_delay), Muon 0.11 and Adafactor 0.06; use one of "
            "these two, or accept the loss with m6.gradient_delay.accept_loss=true"
        )
    if settings.accept_loss and not intolerant:
        raise UserError(
            f"m6.gradient_delay.accept_loss: {' and '.join(optimizers.values())} may be late without it, so it has no "
            "effect; leave it out"
        )
