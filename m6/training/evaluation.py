"""Validation during training: the mean loss of each objective, in nats per target."""

from __future__ import annotations

import torch
import torch.distributed as dist

from m6.data.pretraining import PretrainingData
from m6.runs.processes import Runtime
from m6.training.engine.engine import Engine


@torch.no_grad()
def evaluate(engine: Engine, data: PretrainingData, num_batches: int, runtime: Runtime) -> dict[str, float]:
    """Evaluates each objective with a positive weight on its first ``num_batches`` micro-batches.

    The ranks share the micro-batches. Layers may communicate, so all ranks run the same number of forward passes, and
    the results of surplus passes are dropped.

    Returns:
        the mean loss of each objective in nats per target; without objectives that have no validation data.
    """
    losses: dict[str, float] = {}
    with engine.evaluating():
        for objective in data.active_objectives:
            batches = data.validation_micro_batches(objective, num_batches)
            if not batches:
                continue
            sums = torch.zeros(2, dtype=torch.float64, device=runtime.device)
            for begin in range(0, len(batches), runtime.world_size):
                index = begin + runtime.rank
                # A rank without a micro-batch of its own repeats the last one.
                batch = batches[min(index, len(batches) - 1)].to(runtime.device)
                target_losses = engine.forward(batch).target_losses
                assert target_losses is not None
                if index < len(batches):
                    sums += torch.stack([target_losses.double().sum(), sums.new_tensor(target_losses.numel())])
            dist.all_reduce(sums)
            if sums[1] > 0:
                losses[objective] = float(sums[0] / sums[1])
    return losses
