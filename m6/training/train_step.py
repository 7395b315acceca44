"""One optimizer step over the global batch.

The target tokens of all micro-batches are counted over all ranks first, so that the loss is the mean over the
targets of the whole global batch: the same on 1 or N ranks and for any accumulation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from m6.config.run import RunConfig
from m6.data.pretraining import MicroBatch
from m6.runs.processes import Runtime, seed_everything
from m6.training.engine.clipping import clip_gradients
from m6.training.engine.groups import expert_group
from m6.training.engine.optimizer import set_learning_rate
from m6.training.offloading.experts import offloaded_experts
from m6.training.reporting.experts import ExpertHealth
from m6.training.reporting.sums import StepResult, StepSums, Wishes
from m6.training.schedule import learning_rate_factor
from m6.training.stages.stage import Stage
from moe import BiasBalancer, MoELayer, RoutingStats

_SEED_STRIDE = 1_000_003


@dataclass(frozen=True)
class StepOutcome:
    """What one step did, equal on all ranks but for the times.

    Attributes:
        loss: weighted mean cross entropy over the targets of the global batch, in nats.
        aux_loss: mean over micro-batches of the routers' weighted auxiliary loss.
        skipped: the gradients were not finite, so the weights did not change.
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
    time_s: float


class TrainStep:
    """Runs forward, backward and the update of one global batch."""

    def __init__(self, engine: Any, config: RunConfig, runtime: Runtime, accumulation: int, stage: Stage) -> None:
        self.engine, self.config, self.runtime, self.accumulation = engine, config, runtime, accumulation
        self.stage = stage
        self.expert_group = expert_group("expert_parallel", config.m6.training.ep_size)
        self.health = ExpertHealth(engine.module)
        self.sparse = {
            f"layers.{index}.{name}": module
            for index, layer in enumerate(engine.module.model.layers)
            for name, module in layer.named_modules()
            if isinstance(module, MoELayer)
        }
        self.balancer = BiasBalancer(list(self.sparse.values()))
        self._router_entropy = torch.zeros(len(self.sparse), device=runtime.device)

    def __call__(self, step: int, micro_batches: list[MicroBatch], wishes: Callable[[], Wishes]) -> StepOutcome:
        """Trains on ``micro_batches``, this rank's part of step ``step``.

        Args:
            wishes: what this rank was asked for, called at the end of the step so that a wish that came during it
                counts; any rank's wish reaches all in the outcome.
        """
        begin = time.perf_counter()
        target_weight, tokens, samples, bad_rows = self._count(micro_batches)
        learning_rate = self._set_learning_rate(step)
        sums = StepSums(self.runtime.device)
        offloaded = offloaded_experts(self.engine)
        if offloaded is not None:
            offloaded.begin(learning_rate)
        self.engine.train()
        for index, batch in enumerate(micro_batches):
            seed_everything(self._seed(step, index))
            self._forward_backward(batch, target_weight, sums)
            if index + 1 < len(micro_batches):
                self.engine.step()
        grad_norm, skipped = self._update(learning_rate)
        nonfinite_routers = self._finish_routers(skipped)
        result = sums.reduce(wishes())
        micro_batch_count = self.accumulation * self.runtime.world_size
        return StepOutcome(
            result=result,
            loss=result.weighted_loss_sum / target_weight,
            aux_loss=result.aux_loss_sum / micro_batch_count,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            skipped=skipped,
            nonfinite_routers=nonfinite_routers,
            tokens=int(tokens),
            samples=int(samples),
            bad_rows=int(bad_rows),
            time_s=time.perf_counter() - begin,
        )

    def _count(self, micro_batches: list[MicroBatch]) -> list[float]:
        counts = [
            (float(batch.loss_weights.sum()), batch.num_tokens, batch.num_samples, len(batch.bad_rows))
            for batch in micro_batches
        ]
        totals = torch.tensor(counts, dtype=torch.float64, device=self.runtime.device).sum(0)
        dist.all_reduce(totals)
        return totals.tolist()

    def _set_learning_rate(self, step: int) -> float:
        settings = self.config.m6
        factor = learning_rate_factor(step, settings.training.total_steps, settings.schedule)
        factor *= self.stage.learning_rate_factor(step)
        learning_rate = self.config.deepspeed.optimizer_params["lr"] * factor
        set_learning_rate(self.engine.optimizer, learning_rate)
        return learning_rate

    def _seed(self, step: int, index: int) -> int:
        """A seed for the dropout of the micro-batch with this global number, whichever rank has it."""
        world = self.runtime.world_size
        number = (step * self.accumulation + index) * world + self.runtime.rank
        return (self.config.m6.training.seed * _SEED_STRIDE + number) % 2**63

    def _forward_backward(self, batch: MicroBatch, target_weight: float, sums: StepSums) -> None:
        batch = batch.to(self.runtime.device)
        labelled = batch.labels != -100
        output = self.engine(**batch.model_inputs(), labels=batch.labels, return_logits=False)
        weighted = (output.target_losses * batch.loss_weights[labelled]).sum()
        # DeepSpeed averages over ranks and adds up micro-batches: undo the first for the sum over tokens,
        # and take the mean over micro-batches for the routers' loss, which is one value for each.
        loss = weighted * (self.runtime.world_size / target_weight) + output.aux_loss / self.accumulation
        self.engine.backward(loss, scale_wrt_gas=False)
        sums.add(output.target_losses, weighted, batch.objective_ids[labelled], output.aux_loss)
        if output.router_stats:
            self._add_router_stats(output.router_stats)

    def _add_router_stats(self, stats: tuple[RoutingStats, ...]) -> None:
        self.health.add(stats)
        self._router_entropy = self._router_entropy + torch.stack([layer.router_entropy.sum() for layer in stats])
        if self.config.model.moe_config().balance_bias_rate:
            self.balancer.add(stats)

    def _finish_routers(self, skipped: bool) -> list[str]:
        """Moves the routers' biases; after a skipped step names the routers that were not finite on any rank."""
        entropy, self._router_entropy = self._router_entropy, torch.zeros_like(self._router_entropy)
        if not skipped:
            self.balancer.step()
            return []
        self.balancer.discard()
        if not self.sparse:
            return []
        dist.all_reduce(entropy)
        return [name for name, value in zip(self.sparse, entropy.tolist(), strict=True) if not math.isfinite(value)]

    def _update(self, learning_rate: float) -> tuple[float, bool]:
        """Clips and applies the gradients; returns their norm and whether they were dropped as not finite."""
        offloaded = offloaded_experts(self.engine)
        squares = 0.0 if offloaded is None else offloaded.measure()
        loss_scale = 1.0
        if self.config.deepspeed.zero_stage == 0:
            max_norm = self.config.deepspeed.gradient_clipping
            norm = clip_gradients(self.engine.module, max_norm, self.expert_group, squares)
            skipped = not math.isfinite(norm)
            if skipped:
                self.engine.module.zero_grad(set_to_none=True)  # the engine's step then has nothing to apply
            self.engine.step()
        else:
            loss_scale = float(self.engine.optimizer.loss_scale)
            self.engine.step()
            skipped = bool(self.engine.optimizer.overflow)
            reported = self.engine.get_global_grad_norm()
            norm = float("inf") if skipped or reported is None else float(reported)
        if offloaded is not None:
            offloaded.update(learning_rate, norm, loss_scale)
        return norm, skipped
