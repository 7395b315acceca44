"""The schedule of slices on the runtime of ``torch.distributed.pipelining`` (PyTorch 2.13)."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from m6.planning.cost.schedules import Pass, sliced_orders
from m6.training.engine.pipeline_schedule import NumberedStage, as_scalar

_KINDS = {"forward": _ComputationType.FORWARD, "backward": _ComputationType.FULL_BACKWARD}


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
