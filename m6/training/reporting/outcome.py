"""What a training step returns."""

from __future__ import annotations

from dataclasses import dataclass

from m6.training.reporting.sums import StepResult


@dataclass(frozen=True)
class StepOutcome:
    """What one step did, equal on all ranks but for the times.

    Attributes:
        loss: weighted mean cross entropy over the targets of the global batch, in nats.
        aux_loss: mean over micro-batches of the routers' weighted auxiliary loss.
        skipped: the gradients were not finite, so the weights did not change.
        token_pairs: the sum of the squared lengths of the samples.
        nonfinite_routers: names of the layers whose routers met logits that are not finite; known for skipped steps.
    """

    result: StepResult
    loss: float
    aux_loss: float
    learning_rate: float
    grad_norm: float
    skipped: bool
    nonfinite_routers: list[str]
    tokens: int
    samples: int
    bad_rows: int
    pictures: int
    token_pairs: int
    time_s: float
