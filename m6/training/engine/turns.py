"""Forward passes of interleaved micro-batches, inside DeepSpeed's forward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from m6.data.collate import MicroBatch
from m6.model.outputs import M6Output
from m6.model.stages import ModelStage

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def forward_in_turns(
    deepspeed: DeepSpeedEngine, batches: Sequence[MicroBatch], seeds: Sequence[int], device: torch.device
) -> list[M6Output]:
    """Runs the model on interleaved micro-batches, to overlap computation with the exchange of tokens.

    Args:
        batches: on ``device``.
        seeds: for dropout, one for each micro-batch.
    """
    layers = ModelStage.whole(deepspeed.module)
    inputs = [(batch.model_inputs(), batch.labels) for batch in batches]
    # DeepSpeed's forward pass calls its module, with its autocast and with the hooks for its backward pass.
    vars(deepspeed.module)["forward"] = functools.partial(layers.in_turns, inputs, seeds, device)
    try:
        outputs: list[M6Output] = deepspeed()
    finally:
        del vars(deepspeed.module)["forward"]
    return outputs
