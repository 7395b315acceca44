"""One optimizer step over the global batch, and the learning rate as a function of the step.

A step first counts the tokens and the target tokens of all micro-batches over all ranks. The loss is the mean over the
targets, and the routers' losses are means over the tokens, so neither depends on the number of ranks and of
micro-batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from m6.architecture.names import IGNORED_LABEL
from m6.config.run import RunConfig
from m6.config.sections import ScheduleSettings
from m6.config.shares import BatchSplit
from m6.data.collate import MicroBatch
from m6.model.outputs import M6Output
from m6.runs.processes import Runtime
from m6.runs.signals import Requests
from m6.training.engine.engine import Engine
from m6.training.engine.updater import Update
from m6.training.mesh import ParallelDims
from m6.training.reporting.experts import ExpertHealth
from m6.training.reporting.noise import GradientNoise
from m6.training.reporting.sums import StepOutcome, StepResult, StepSums, sum_of_all
from m6.training.stages.stage import Stage
from moe import BiasBalancer, MoELayer, RoutingStats

NEXT_RATE = "next_learning_rate"
"""The key of a checkpoint's state with the schedule's learning rate for the next step."""


def scheduled_rate(step: int, config: RunConfig) -> float:
    """Returns the schedule's learning rate of optimizer step ``step`` (the first is 0)."""
    peak: float = config.deepspeed.optimizer_params["lr"]
    return peak * learning_rate_factor(step, config.m6.training.total_steps, config.m6.schedule)


def changed_rate(config: RunConfig, state: dict[str, Any]) -> str | None:
    """Returns a warning if the learning rate of a resumed run differs from the checkpoint's schedule, else None."""
    step, before = state["step"], state.get(NEXT_RATE)
    rate = scheduled_rate(step, config)
    if before is None or math.isclose(rate, before, rel_tol=1e-9):
        return None
    return (
        f"warning: the learning rate goes on at {rate:.4g}; with the settings of the checkpoint it would be "
        f"{before:.4g}. m6.training.total_steps, m6.schedule or optimizer.params.lr has changed"
    )


def learning_rate_factor(step: int, total_steps: int, settings: ScheduleSettings) -> float:
    """Returns the learning rate of optimizer step ``step`` (the first is 0), divided by its peak.

    A linear warm-up is followed by ``constant``, ``cosine``, ``polynomial`` or ``wsd``. ``wsd`` is warm-up, stable,
    decay (Hu et al. 2024, arXiv 2404.06395) with a linear decay.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps  # not from 0: the first step would be wasted
    if settings.decay == "constant":
        return 1.0
    decay_steps = settings.decay_steps(total_steps)
    # wsd stays at the peak before ``begin``; for the other shapes ``begin`` is the end of the warm-up.
    begin = total_steps - decay_steps
    # decay_steps - 1: the last step of the run has exactly the final learning rate.
    progress = min(1.0, max(0.0, (step - begin) / max(1, decay_steps - 1)))
    floor = settings.final_lr_ratio
    if settings.decay == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif settings.decay == "polynomial":
        shape = (1.0 - progress) ** settings.power
    else:
        shape = 1.0 - progress
    return floor + (1.0 - floor) * shape


# Larger than the number of micro-batches of most runs, so that different seeds give different dropout.
_SEED_STRIDE = 1_000_003


def micro_batch_numbers(config: RunConfig, dims: ParallelDims, split: BatchSplit, step: int) -> list[int]:
    """Returns the global numbers of a rank's micro-batches in a step.

    A step has the same micro-batches on any number of ranks, whatever their shares. Each rank has a contiguous part, so
    that it reads few lanes of the sources (m6/data/order.py). The ranks of a pipeline have the same micro-batches.
    ``config.ranks_per_part`` neighbours share a part and take its interleaved micro-batches. The set of simultaneous
    micro-batches is then the same on any number of ranks.
    """
    sizes, together = config.batch_sizes, config.ranks_per_part
    shares = split.shares(sizes.of(step))
    part, place = dims.part(together)
    first = sizes.before(step) // config.deepspeed.micro_batch_size + sum(shares[: part * together]) + place
    return [first + index * together for index in range(shares[dims.dp_rank])]


@dataclass
class StepState:
    """A step after its forward passes on this rank.

    Attributes:
        step: number of the step; the first is 0.
        learning_rate: of the step.
        micro_batches: number of micro-batches of the global batch.
        targets: number of targets of the global batch.
        tokens, samples, bad_rows, pictures, token_pairs: see ``StepOutcome``.
        sums: of this rank.
        router_entropy: sums over this rank's micro-batches, of each sparse layer.
    """

    step: int
    learning_rate: float
    micro_batches: int
    targets: int
    tokens: int
    samples: int
    bad_rows: int
    pictures: int
    token_pairs: int
    sums: StepSums
    router_entropy: Tensor

    def outcome(self, update: Update, result: StepResult, nonfinite_routers: list[str]) -> StepOutcome:
        """Returns the outcome of the step."""
        return StepOutcome(
            step=self.step + 1,
            result=result,
            loss=result.loss_sum / self.targets,
            aux_loss=result.aux_loss_sum / max(self.tokens, 1),
            learning_rate=self.learning_rate,
            grad_norm=update.grad_norm,
            skipped=update.skipped,
            loss_scale=update.loss_scale,
            nonfinite_routers=nonfinite_routers,
            nonfinite_stages=update.nonfinite_stages,
            tokens=self.tokens,
            samples=self.samples,
            bad_rows=self.bad_rows,
            pictures=self.pictures,
            token_pairs=self.token_pairs,
            own_nonfinite_losses=self.sums.nonfinite() if update.skipped else (),
        )


class TrainStep:
    """Runs forward, backward and the update of one global batch."""

    def __init__(self, engine: Engine, config: RunConfig, runtime: Runtime, stage: Stage) -> None:
        self.engine, self.config, self.runtime = engine, config, runtime
        self.stage = stage
        self.dims = ParallelDims.of(config, runtime.rank, runtime.world_size)
        self._exact = config.m6.training.deterministic is not None
        self._batch_split = config.batch_split(runtime.world_size)
        self._is_sliced = config.pipeline is not None and config.pipeline.slices is not None
        self.health = ExpertHealth(engine.module, config.model)
        self.noise = GradientNoise(config, engine)
        # In the order of the forward pass and of the router statistics. None: the layer is on another rank.
        self.sparse: dict[str, MoELayer | None] = {
            f"layers.{index}.ffn": getattr(layer, "ffn", None)
            for index, layer in enumerate(engine.module.model.layers)
            if config.model.is_moe_layer(index)
        }
        self.balancer = BiasBalancer([layer for layer in self.sparse.values() if layer is not None], engine.replicas)

    def __call__(
        self, step: int, micro_batches: list[MicroBatch], read_requests: Callable[[], Requests]
    ) -> list[StepOutcome]:
        """Trains one step.

        Args:
            step: number of the step; the first is 0.
            micro_batches: this rank's part of the step.
            read_requests: returns the requests to this rank. It is called at the end of the step, so that requests
                during the step count. The outcome holds the requests of all ranks.

        Returns:
            the outcomes of finished steps: here only of this step.
        """
        begun = self._begin(step, micro_batches)
        update = self.engine.update()
        self.noise.measure(update, begun.micro_batches)
        nonfinite_routers = self._finish_routers(begun, update.skipped)
        # The requests travel with the sums: one collective for both.
        return [begun.outcome(update, begun.sums.reduce(read_requests()), nonfinite_routers)]

    def flush(self) -> list[StepOutcome]:
        """Ends all steps in flight and returns their outcomes. Here it is a no-op."""
        return []

    def _begin(self, step: int, micro_batches: list[MicroBatch]) -> StepState:
        """Runs the passes of a step. The engine may leave some of its backward passes for later."""
        shares = self._batch_split.shares(self.config.batch_sizes.of(step))
        targets, tokens, samples, bad_rows, pictures, token_pairs = self._count(micro_batches, max(shares))
        begun = StepState(
            step=step,
            learning_rate=self._learning_rate(step),
            micro_batches=sum(shares),
            targets=int(targets),
            tokens=int(tokens),
            samples=int(samples),
            bad_rows=int(bad_rows),
            pictures=int(pictures),
            token_pairs=int(token_pairs),
            sums=StepSums(
                self.runtime.device, self._exact, self.dims.tp_rank == 0, self._is_sliced or len(set(shares)) > 1
            ),
            router_entropy=torch.zeros(len(self.sparse), device=self.runtime.device),
        )

        def loss(batch: MicroBatch, output: M6Output) -> Tensor:
            return self._loss(batch, output, begun)

        self.engine.begin_step(begun.learning_rate, shares)
        with self.noise.watch(step):
            numbers = micro_batch_numbers(self.config, self.dims, self._batch_split, step)
            seeds = [self._seed(number) for number in numbers]
            self.engine.accumulate(micro_batches, loss, seeds)
        return begun

    def _count(self, micro_batches: list[MicroBatch], most: int) -> list[float]:
        """Sums over the global batch: targets, tokens, samples, bad rows, pictures and pairs of tokens.

        Args:
            most: the largest number of micro-batches of a rank.
        """
        counts = [
            (
                batch.num_target_tokens,
                batch.num_tokens,
                batch.num_samples,
                len(batch.bad_rows),
                len(batch.pixel_values),
                batch.num_token_pairs,
            )
            for batch in micro_batches
        ]
        # fp64 holds counts of tokens and pairs exactly.
        values = torch.tensor(counts, dtype=torch.float64, device=self.runtime.device)
        values = torch.nn.functional.pad(values, (0, 0, 0, max(0, most - len(counts))))  # equal shapes on all ranks
        return sum_of_all(values, self._exact, self.engine.replicas)

    def _learning_rate(self, step: int) -> float:
        return scheduled_rate(step, self.config) * self.stage.learning_rate_factor(step)

    def _seed(self, number: int) -> int:
        """Returns the seed for the dropout of a micro-batch. It depends on the global number and not on the rank."""
        return (self.config.m6.training.seed * _SEED_STRIDE + number) % 2**63

    def _loss(self, batch: MicroBatch, output: M6Output, begun: StepState) -> Tensor:
        """Returns the contribution of this micro-batch, or of a part of its layers, to the loss of the global batch."""
        assert output.aux_loss is not None
        labelled, losses = batch.labels != IGNORED_LABEL, output.target_losses
        if losses is None:  # a stage of a pipeline before the last one
            labelled, losses = torch.zeros_like(labelled), output.aux_loss.new_zeros(0)
        loss = losses.sum()
        begun.sums.add(
            losses, loss, batch.objective_ids[labelled], output.aux_loss.detach().double() * batch.num_tokens
        )
        if output.router_stats:
            self._add_router_stats(begun, output.router_stats)
        # The engine may average gradients over ranks, so the loss is multiplied by their number. Divided by the targets
        # of all ranks, the sum becomes the mean over targets. The routers' loss is a mean over the micro-batch's
        # tokens: multiplied by their share of all tokens, it adds up to the mean over the global batch.
        averaged_over = self.engine.averaged_over
        per_target, share = averaged_over / begun.targets, averaged_over * batch.num_tokens / max(begun.tokens, 1)
        return loss * per_target + output.aux_loss * share

    def _add_router_stats(self, begun: StepState, stats: tuple[RoutingStats, ...]) -> None:
        self.health.add(stats)
        # A router with non-finite logits has a non-finite entropy. A skipped step can thus name the router.
        begun.router_entropy += torch.stack([layer.router_entropy.detach().sum() for layer in stats])
        if self.config.model.moe_config().balance_bias_rate:
            own = zip(stats, self.sparse.values(), strict=True)
            self.balancer.add(layer for layer, module in own if module is not None)

    def _finish_routers(self, begun: StepState, skipped: bool) -> list[str]:
        """Updates the routers' biases; after a skipped step returns the routers with non-finite logits on any rank."""
        if not skipped:
            self.balancer.step()
            return []
        self.balancer.discard()
        if not self.sparse:
            return []
        dist.all_reduce(begun.router_entropy)
        entropy = begun.router_entropy.tolist()
        return [name for name, value in zip(self.sparse, entropy, strict=True) if not math.isfinite(value)]


class AsyncTrainStep(TrainStep):
    """Begins a step, and ends the previous step.

    No rank waits for the end of the new step; its sums are also read one step later. All passes end before the run
    logs, evaluates, compares or saves (``RunConfig.flushes_after``), and after a request to stop or save.
    """

    def __init__(self, engine: Engine, config: RunConfig, runtime: Runtime, stage: Stage) -> None:
        super().__init__(engine, config, runtime, stage)
        self._in_flight: deque[tuple[StepState, Callable[[], StepResult]]] = deque()

    def __call__(
        self, step: int, micro_batches: list[MicroBatch], read_requests: Callable[[], Requests]
    ) -> list[StepOutcome]:
        """See ``TrainStep``: returns the outcome of the previous step, of this step, of both, or of none."""
        begun = self._begin(step, micro_batches)
        self._in_flight.append((begun, begun.sums.reduce_later(read_requests())))
        update = self.engine.advance()
        outcomes = [] if update is None else [self._end(update)]
        asked = any(outcome.result.requests != Requests() for outcome in outcomes)
        return outcomes + self.flush() if asked or self.config.flushes_after(step + 1) else outcomes

    def flush(self) -> list[StepOutcome]:
        """See ``TrainStep.flush``."""
        return [self._end(self.engine.update())] if self._in_flight else []

    def _end(self, update: Update) -> StepOutcome:
        begun, result = self._in_flight.popleft()
        nonfinite_routers = self._finish_routers(begun, update.skipped)
        return begun.outcome(update, result(), nonfinite_routers)
