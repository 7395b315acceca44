"""The result of a training step."""

from __future__ import annotations

from dataclasses import dataclass

from m6.training.reporting.sums import StepResult


@dataclass(frozen=True)
class StepOutcome:
    """The result of one step; equal on all ranks, except ``own_nonfinite_losses``.

    Attributes:
        step: number of finished steps, this one included.
        result: sums over all ranks, and the requests of all ranks.
        loss: mean cross entropy over the targets of the global batch, in nats.
        aux_loss: mean over tokens of the routers' weighted auxiliary losses.
        grad_norm: norm of all gradients before clipping.
        skipped: whether a gradient was not finite. Then no weight changed.
        loss_scale: of the gradients; 1 except in fp16.
        nonfinite_routers: names of the layers with non-finite router logits; empty if the step was not skipped.
        nonfinite_stages: see ``Update``.
        tokens, samples, pictures: of the global batch, without padding.
        bad_rows: number of unusable rows of the data.
        token_pairs: sum of the squared lengths of the samples.
        own_nonfinite_losses: see ``StepSums.nonfinite``, of this rank; empty if the step was not skipped.
    """

    step: int
    result: StepResult
    loss: float
    aux_loss: float
    learning_rate: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    nonfinite_routers: list[str]
    nonfinite_stages: tuple[str, ...]
    tokens: int
    samples: int
    bad_rows: int
    pictures: int
    token_pairs: int
    own_nonfinite_losses: tuple[str, ...] = ()
