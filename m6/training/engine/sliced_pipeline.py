"""The runner of ``m6.parallel.pipeline.slices``: a pipeline over slices of rows.

Its schedule runs on the runtime of ``torch.distributed.pipelining`` (PyTorch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from m6.model.outputs import M6Output
from m6.model.slices import SliceKeys
from m6.model.stages import ModelStage
from m6.training.deepspeed_private import expert_group
from m6.training.engine.pipeline import PipelineRunner
from m6.training.engine.pipeline_schedule import NumberedStage, as_scalar
from m6.training.engine.runner import Step
from m6.training.engine.slices import Slice, SliceChoice, slices_of
from m6.training.pass_orders import Pass, sliced_orders

_KINDS = {"forward": _ComputationType.FORWARD, "backward": _ComputationType.FULL_BACKWARD}


class SlicedPipelineRunner(PipelineRunner):
    """Cuts the rows of each micro-batch at common split points, and runs 1F1B over the slices.

    Losses and gradients equal those of whole rows, including the load-balancing loss. Dropout and the noise of routers
    depend on the micro-batch, the layer and the start of the slice.
    """

    def __init__(self, *arguments: Any) -> None:
        self._slices: list[Slice] = []
        self._keys: list[SliceKeys] = []  # of each micro-batch
        self._counts: list[int] = []  # slices of each micro-batch since the last report
        super().__init__(*arguments)
        for block in self._module.model.layers:
            # A recomputed block finds its keys in the cache, see ``SliceCache.update``.
            block._can_checkpoint_with_cache = True

    def _build_schedule(self) -> Any:
        # With "any_world" the slices of a row must not depend on the number of pipelines.
        own = self._scheduled[self._mesh.dims.dp_rank]
        of_slices = sum(self._scheduled) if self._reducer.measures_sums else own
        self._choice = SliceChoice(self._config, of_slices)
        [stage] = self._numbered_stages()
        return SlicedSchedule(stage, own * self._choice.most)

    def accumulate(self, step: Step) -> None:
        """See ``Runner.accumulate``."""
        super().accumulate(step)
        self._slices, self._keys = [], []

    def interval_metrics(self) -> dict[str, Any]:
        """Returns ``slices``, the mean number of slices of a micro-batch."""
        counts, self._counts = self._counts, []
        return {"slices": sum(counts) / max(1, len(counts))}

    def _prepared(self, step: Step) -> Step:
        cuts = self._common([self._choice.cuts(batch) for batch in step.batches])
        self._slices = [
            each
            for number, (batch, seed) in enumerate(zip(step.batches, step.seeds, strict=True))
            for each in slices_of(batch, number, seed, cuts[number], self._config.model)
        ]
        self._keys = [SliceKeys(batch.sample_ids) for batch in step.batches]
        counts = tuple(len(each) + 1 for each in cuts)
        self._counts += counts
        self._schedule.prepare(counts)
        batches = [each.batch.to(self._device) for each in self._slices]
        return replace(step, batches=batches, seeds=[each.seed for each in self._slices])

    def _common(self, cuts: list[list[int]]) -> list[list[int]]:
        """Leaves out cuts, so ranks that exchange tokens have equally many slices of each micro-batch."""
        if self._config.m6.training.ep_size == 1:
            return cuts
        numbers = torch.tensor([len(each) for each in cuts], device=self._device)
        is_uneven = len(set(self._scheduled)) > 1  # then the groups have different numbers of micro-batches
        experts = expert_group("expert_parallel", self._config.m6.training.ep_size)
        group = experts if self._reducer.measures_sums or is_uneven else self._mesh.replicas
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=group)
        return [subsample(each, number) for each, number in zip(cuts, numbers.tolist(), strict=True)]

    def _end_pass(self, part: int, number: int) -> None:
        if self._slices[number].begin == 0:  # backward passes run from the last slice to the first
            super()._end_pass(part, number)

    def _run_number(self, stage: ModelStage, hidden_states: Tensor | None, number: int) -> tuple[Tensor, M6Output]:
        assert self._step is not None
        own, batch = self._slices[number], self._step.batches[number]
        past = self._keys[own.number].of_slice(own.begin)
        return self._run(stage, hidden_states, batch, own.seed, past)


def subsample(cuts: Sequence[int], number: int) -> list[int]:
    """Returns ``number`` of the cuts, evenly spread."""
    return [cuts[(index + 1) * (len(cuts) + 1) // (number + 1) - 1] for index in range(number)]


class SlicedSchedule(_PipelineScheduleRuntime):
    """Runs ``sliced_orders``. PyTorch adds the messages to the passes, and treats each slice as a micro-batch.

    Args:
        stage: this rank's only stage.
        most: the largest number of slices in a step.
    """

    def __init__(self, stage: NumberedStage, most: int) -> None:
        super().__init__([stage], most, loss_fn=as_scalar, scale_grads=False)
        self._most = most
        self._slices: tuple[int, ...] = ()

    def prepare(self, slices: tuple[int, ...]) -> None:
        """Sets the number of slices of each micro-batch of the next step. It is equal on all ranks of the pipeline."""
        if slices == self._slices:
            return
        self._slices, self._n_microbatches = slices, sum(slices)
        orders = sliced_orders(self.pp_group_size, slices)
        self._prepare_schedule_with_comms({rank: [_action(each) for each in o] for rank, o in enumerate(orders)})

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        # Once, with room for any step.
        number, self._n_microbatches = self._n_microbatches, self._most
        super()._initialize_stages(*args, **kwargs)
        self._n_microbatches = number


def _action(each: Pass) -> _Action:
    return _Action(each.stage, _KINDS[each.kind], each.number)
