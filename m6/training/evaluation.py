"""Validation during training: the mean loss of each objective and of each source, in nats per target."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from m6.architecture.names import IGNORED_LABEL
from m6.data.pretraining import PretrainingData
from m6.runs.processes import Runtime
from m6.training.engine.engine import Engine
from m6.training.mesh import ParallelDims
from m6.training.reporting.nonfinite import ranks_with_losses


@torch.no_grad()
def evaluate(
    engine: Engine, data: PretrainingData, num_rows: int, dims: ParallelDims, runtime: Runtime
) -> dict[str, dict[str, Any]]:
    """Evaluates each objective with a positive weight on its first ``num_rows`` rows.

    The rows do not depend on the size of a micro-batch or on the number of ranks. Each pipeline, or each rank without
    one, evaluates a share of the micro-batches. Layers may communicate, so all ranks run the same number of forward
    passes. Results of surplus passes are dropped. A warning names the ranks with losses that are not finite.

    Returns:
        ``validation``: the mean loss of each objective in nats per target; objectives without validation data are left
            out.
        ``validation_by_source``: the same for each source of an objective; empty if the run reads one source.
    """
    losses, by_source, device = {}, {}, runtime.device
    is_finite, own_nonfinite = True, []
    with engine.evaluating():
        for objective in data.active_objectives:
            batches = data.validation_micro_batches(objective, num_rows)
            if not batches:
                continue
            sums = torch.zeros(2, len(data.sources), dtype=torch.float64, device=device)
            for begin in range(0, len(batches), dims.dp):
                index = begin + dims.dp_rank
                # A rank without its own micro-batch repeats the last one, because layers may communicate.
                batch = batches[min(index, len(batches) - 1)].to(device)
                target_losses = engine.forward(batch).target_losses
                if target_losses is not None and index < len(batches):
                    sources = batch.data_source_ids[batch.labels != IGNORED_LABEL]
                    sums[0].index_add_(0, sources, target_losses.double())
                    sums[1].index_add_(0, sources, torch.ones_like(target_losses, dtype=torch.float64))
            if not sums.isfinite().all():
                own_nonfinite.append(objective)
            dist.all_reduce(sums)
            is_finite = is_finite and bool(sums.isfinite().all())
            total, targets = sums.sum(1).tolist()
            if targets > 0:
                losses[objective] = total / targets
            read = {
                source: loss / count
                for source, loss, count in zip(data.sources, *sums.tolist(), strict=True)
                if count > 0
            }
            if len(data.sources) > 1:
                by_source[objective] = read
    if not is_finite and (found := ranks_with_losses(own_nonfinite, runtime)) and runtime.is_main:
        print(f"warning: validation: {found}", file=sys.stderr)
    return {"validation": losses, "validation_by_source": by_source}
