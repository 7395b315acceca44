"""What a training step reports: summed on the device, reduced over the ranks once, averaged per log interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m6.data.objectives import OBJECTIVES
from moe import RoutingStats

_COLUMNS = 2 * len(OBJECTIVES)


@dataclass(frozen=True)
class Wishes:
    """What a rank was asked for during a step; the ranks act on the wish of any of them, together."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepResult:
    """The sums of one step over all ranks and micro-batches."""

    loss_sums: dict[str, float]
    targets: dict[str, float]
    aux_loss_sum: float
    weighted_loss_sum: float
    wishes: Wishes

    def objective_losses(self) -> dict[str, float]:
        """Mean loss in nats per target of every objective that occurred."""
        return {name: self.loss_sums[name] / count for name, count in self.targets.items() if count}


class StepSums:
    """Sums of one optimizer step over its micro-batches; ``reduce`` adds the ranks in one collective."""

    def __init__(self, device: torch.device) -> None:
        # [sum of losses per objective | targets per objective | aux loss | weighted loss | stop | save]
        self._sums = torch.zeros(_COLUMNS + 4, dtype=torch.float64, device=device)

    def add(self, losses: Tensor, weighted_loss: Tensor, objective_ids: Tensor, aux_loss: Tensor) -> None:
        """Adds a micro-batch.

        Args:
            losses: [N] cross entropy of each target, in nats.
            weighted_loss: [] its weighted sum.
            objective_ids: [N] the objective of each target.
            aux_loss: [] the routers' weighted auxiliary loss.
        """
        losses = losses.detach().double()
        self._sums.index_add_(0, objective_ids, losses)
        self._sums.index_add_(0, objective_ids + len(OBJECTIVES), torch.ones_like(losses))
        self._sums[_COLUMNS] += aux_loss.detach()
        self._sums[_COLUMNS + 1] += weighted_loss.detach()

    def reduce(self, wishes: Wishes) -> StepResult:
        """Sums over all ranks; the only host synchronisation of a step."""
        self._sums[_COLUMNS + 2] = float(wishes.stop)
        self._sums[_COLUMNS + 3] = float(wishes.save)
        dist.all_reduce(self._sums)
        values = self._sums.tolist()
        objectives = len(OBJECTIVES)
        return StepResult(
            loss_sums=dict(zip(OBJECTIVES, values[:objectives], strict=True)),
            targets=dict(zip(OBJECTIVES, values[objectives:_COLUMNS], strict=True)),
            aux_loss_sum=values[_COLUMNS],
            weighted_loss_sum=values[_COLUMNS + 1],
            wishes=Wishes(stop=values[_COLUMNS + 2] > 0, save=values[_COLUMNS + 3] > 0),
        )


class ExpertHealth:
    """Load of every expert over a log interval; accumulates on the device without synchronising."""

    def __init__(self) -> None:
        self._layers: list[dict[str, Tensor]] = []

    def add(self, stats: tuple[RoutingStats, ...]) -> None:
        if not self._layers:
            self._layers = [{key: torch.zeros_like(value) for key, value in layer._asdict().items()} for layer in stats]
        for sums, layer in zip(self._layers, stats, strict=True):
            for key, value in layer._asdict().items():
                # The entropy is a mean over tokens: weigh it, so that the sums can be divided later.
                sums[key] += value.detach() * layer.num_tokens if key == "router_entropy" else value.detach()

    def reduce(self) -> dict[str, Any]:
        """Per-layer figures over all ranks, and a fresh start.

        Returns:
            load_cv: standard deviation over mean of the experts' loads (M6-T, section 3); dropped_fraction: routed
            choices beyond capacity; unused_experts; router_entropy in nats. Lists with one entry a layer.
        """
        if not self._layers:
            return {}
        report: dict[str, list[float]] = {
            "load_cv": [],
            "dropped_fraction": [],
            "unused_experts": [],
            "router_entropy": [],
        }
        for sums in self._layers:
            flat = torch.cat([value.reshape(-1).double() for value in sums.values()])
            dist.all_reduce(flat)
            values = dict(zip(sums, flat.split([value.numel() for value in sums.values()]), strict=True))
            counts, dropped = values["expert_counts"], float(values["dropped"])
            computed = float(counts.sum())
            report["load_cv"].append(float(counts.std(correction=0) / counts.mean().clamp_min(1e-9)))
            report["dropped_fraction"].append(dropped / max(1.0, computed + dropped))
            report["unused_experts"].append(int((counts == 0).sum()))
            report["router_entropy"].append(float(values["router_entropy"]) / max(1.0, float(values["num_tokens"])))
        self._layers = []
        return {"experts": report}
