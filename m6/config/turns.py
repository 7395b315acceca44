"""Whether micro-batches can take turns in a run: the checks of ``m6.training.micro_batches_at_once``."""

from __future__ import annotations


def turns_refusal(at_once: int, accumulation: int) -> str | None:
    """Why ``accumulation`` micro-batches of a rank cannot take turns by ``at_once``; None if they can."""
    if accumulation % at_once == 0:
        return None
    fitting = [number for number in range(1, accumulation + 1) if accumulation % number == 0]
    return (
        f"m6.training.micro_batches_at_once {at_once} does not divide the {accumulation} micro-batches of a rank and "
        f"step; use {max(number for number in fitting if number <= at_once)}, or a smaller "
        "train_micro_batch_size_per_gpu"
    )
