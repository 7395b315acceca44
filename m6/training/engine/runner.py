"""Micro-batch runners: in which order the passes of a step run on this rank."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.model.modeling import M6ForConditionalGeneration
from m6.model.outputs import M6Output
from m6.model.stages import ModelStage
from m6.training.engine.reducer import GradientReducer
from m6.training.engine.updater import Update, Updater
from m6.training.mesh import Mesh

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

LossFunction = Callable[[MicroBatch, M6Output], Tensor]
"""Maps a micro-batch and the model's output, both on the device, to the loss for ``accumulate``.

A runner may have the output in parts. Each part then has the auxiliary loss and the statistics of some layers, with
zeros for the other layers. One part has the losses of the targets."""


@dataclass(frozen=True)
class Step:
    """The inputs of a step on this rank.

    Attributes:
        batches: the micro-batches, on any device. Every rank of a pipeline has all of them.
        seeds: one seed per micro-batch, for dropout.
        loss: see ``LossFunction``; it gets micro-batches on the device.
        passes: the number of backward passes of each rank along ``dp``.
        learning_rate: of the step.
    """

    batches: Sequence[MicroBatch]
    seeds: Sequence[int]
    loss: LossFunction
    passes: tuple[int, ...]
    learning_rate: float


class Runner(ABC):
    """Runs the passes of a step.

    It knows no ranks along ``dp``, except how many passes each has. After each backward pass it tells the reducer.

    Args:
        reducer, updater: of the engine.

    Attributes:
        averaged_over: gradients are summed over all ranks and divided by this number.
    """

    def __init__(
        self, deepspeed: DeepSpeedEngine, config: RunConfig, mesh: Mesh, reducer: GradientReducer, updater: Updater
    ) -> None:
        self._deepspeed, self._config = deepspeed, config
        self._mesh, self._device = mesh, mesh.device
        self._reducer, self._updater = reducer, updater
        self._module: M6ForConditionalGeneration = deepspeed.module
        self.averaged_over = 1

    @abstractmethod
    def accumulate(self, step: Step) -> None:
        """Adds the gradients of this rank's micro-batches to those of the parameters."""

    @abstractmethod
    def forward(self, batch: MicroBatch, seed: int | None) -> M6Output:
        """See ``Engine.forward``."""

    def update(self, learning_rate: float) -> Update:
        """Ends the step, see ``Engine.update``."""
        return self._updater.update(self._sums(), learning_rate)

    def advance(self) -> Update | None:
        """See ``Engine.advance``."""
        return None

    def begin_evaluation(self) -> None:
        """Prepares forward passes outside of a step. All ranks call it."""
        return

    def interval_metrics(self) -> dict[str, Any]:
        """Entries of metrics.jsonl since the last call."""
        return {}

    def _sums(self) -> dict[nn.Parameter, Tensor] | None:
        """Returns the gradients of the step, summed over ranks; None: DeepSpeed has the sums."""
        sums = None
        if self._reducer.sums_here:
            sums = self._reducer.sums(self._updater.scale, self.averaged_over)
        self._reducer.end_step()
        return sums


class PlainRunner(Runner):
    """One micro-batch after the other through the whole model, or several interleaved micro-batches at a time."""

    def __init__(
        self, deepspeed: DeepSpeedEngine, config: RunConfig, mesh: Mesh, reducer: GradientReducer, updater: Updater
    ) -> None:
        super().__init__(deepspeed, config, mesh, reducer, updater)
        self._at_once = config.m6.training.overlap_micro_batches
        self._reduces_alone = deepspeed.enable_backward_allreduce
        self.averaged_over = 1 if reducer.measures_sums else mesh.dims.dp

    def accumulate(self, step: Step) -> None:
        """See ``Runner.accumulate``."""
        self._deepspeed.enable_backward_allreduce = self._reduces_alone and not self._reducer.sums_here
        if self._reducer.sums_here:
            # Without a boundary DeepSpeed only accumulates: it reduces nothing.
            self._deepspeed.set_gradient_accumulation_boundary(False)
            for _ in self._each(step):
                self._reducer.end_pass(step.passes)
            return
        last = len(step.batches) // self._at_once - 1
        # DeepSpeed's own count of micro-batches assumes a constant batch, but the batch may grow.
        self._deepspeed.set_gradient_accumulation_boundary(last == 0)
        for index in self._each(step):
            if index < last:
                self._deepspeed.step()  # before the last micro-batch, DeepSpeed only counts
                self._deepspeed.set_gradient_accumulation_boundary(index + 1 == last)

    def _each(self, step: Step) -> Iterator[int]:
        """Runs the passes, and yields the index of each backward pass after it. Interleaved micro-batches share one."""
        self._deepspeed.train()
        for index in range(len(step.batches) // self._at_once):
            own = slice(index * self._at_once, (index + 1) * self._at_once)
            batches = [batch.to(self._device) for batch in step.batches[own]]
            losses = map(step.loss, batches, self.forward_all(batches, step.seeds[own]))
            self.backward(functools.reduce(operator.add, losses))
            yield index

    def forward_all(self, batches: Sequence[MicroBatch], seeds: Sequence[int]) -> list[M6Output]:
        """Runs the model on several interleaved micro-batches, see ``m6.model.stages``, or on a single micro-batch."""
        if len(batches) == 1:
            return [self.forward(batches[0], seeds[0])]
        return _forward_interleaved(self._deepspeed, batches, seeds, self._device)

    def backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of ``loss``, already normalised by the global batch."""
        # DeepSpeed would divide by the number of micro-batches, but the loss is already normalised by all targets.
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def forward(self, batch: MicroBatch, seed: int | None) -> M6Output:
        """See ``Engine.forward``."""
        output: M6Output = self._deepspeed(
            **batch.model_inputs(), labels=batch.labels, return_logits=False, dropout_seed=seed
        )
        return output


def _forward_interleaved(
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
    vars(deepspeed.module)["forward"] = functools.partial(layers.forward_interleaved, inputs, seeds, device)
    try:
        outputs: list[M6Output] = deepspeed()
    finally:
        del vars(deepspeed.module)["forward"]
    return outputs
