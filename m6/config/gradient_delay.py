"""The section ``m6.gradient_delay``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from m6.validation import Section

FLUSHLESS: Literal["1f1b"] = "1f1b"
"""The schedule that goes on from step to step without a flush."""


class GradientDelaySettings(Section):
    """Uses each gradient one step late: W(t+1) = W(t) - lr u(g(W(t-1))) (PipeDream-2BW, arXiv 2006.09503). The host
    then updates offloaded experts beside a whole step, and a pipeline goes on from step to step without a flush. It
    changes what is learned."""

    accept_loss: bool = Field(
        False, description="train although the optimizer learns worse with the delay: AdamW, LAMB, LARS, SGD"
    )
