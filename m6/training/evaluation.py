"""Mean loss per objective on a fixed part of a split, in nats per target."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from m6.data.pretraining import PretrainingData
from m6.runs.processes import Runtime
from m6.training.offloading.experts import evaluating


@torch.no_grad()
def evaluate(engine: Any, data: PretrainingData, num_batches: int, runtime: Runtime) -> dict[str, float]:
    """Evaluates every objective with a positive weight on its first ``num_batches`` micro-batches.

    The ranks share the micro-batches; since layers may communicate, all ranks do equally many forward
    passes, and surplus ones do not count.
    """
    was_training = engine.module.training
    engine.eval()
    losses: dict[str, float] = {}
    for objective in data.active_objectives:
        batches = data.validation_micro_batches(objective, num_batches)
        if not batches:
            continue
        sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)
        for begin in range(0, len(batches), runtime.world_size):
            index = begin + runtime.rank
            batch = batches[min(index, len(batches) - 1)].to(runtime.device)
            with evaluating(engine):
                output = engine(**batch.model_inputs(), labels=batch.labels, return_logits=False)
            if index < len(batches):
                sums += torch.stack(
                    [output.target_losses.double().sum(), sums.new_tensor(output.target_losses.numel())]
                )
        dist.all_reduce(sums)
        if sums[1] > 0:
            losses[objective] = float(sums[0] / sums[1])
    engine.train(was_training)
    return losses
