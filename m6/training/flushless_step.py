"""Overlapping steps of a pipeline without a flush."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from m6.config.run import RunConfig
from m6.data.collate import MicroBatch
from m6.runs.processes import Runtime
from m6.runs.signals import Requests
from m6.training.engine.engine import Engine, Update
from m6.training.engine.flushless_pipeline import FlushlessPipelineEngine
from m6.training.reporting.sums import StepOutcome, StepResult
from m6.training.stages.stage import Stage
from m6.training.train_step import BegunStep, TrainStep


class FlushlessTrainStep(TrainStep):
    """Begins a step, and ends the previous step.

    No rank waits for the end of the new step; its sums are also read one step later. All passes end before the run
    logs, evaluates, compares or saves (``RunConfig.flushes_after``), and after a request to stop or save.
    """

    def __init__(self, engine: Engine, config: RunConfig, runtime: Runtime, stage: Stage) -> None:
        super().__init__(engine, config, runtime, stage)
        assert isinstance(engine, FlushlessPipelineEngine)
        self._pipeline = engine
        self._under_way: deque[tuple[BegunStep, Callable[[], StepResult]]] = deque()

    def __call__(
        self, step: int, micro_batches: list[MicroBatch], read_requests: Callable[[], Requests]
    ) -> list[StepOutcome]:
        """See ``TrainStep``: returns the outcome of the previous step, of this step, of both, or of none."""
        begun = self._begin(step, micro_batches)
        self._under_way.append((begun, begun.sums.reduce_later(read_requests())))
        update = self._pipeline.advance()
        outcomes = [] if update is None else [self._end(update)]
        asked = any(outcome.result.requests != Requests() for outcome in outcomes)
        return outcomes + self.flush() if asked or self.config.flushes_after(step + 1) else outcomes

    def flush(self) -> list[StepOutcome]:
        """See ``TrainStep.flush``."""
        return [self._end(self._pipeline.update())] if self._under_way else []

    def _end(self, update: Update) -> StepOutcome:
        begun, result = self._under_way.popleft()
        nonfinite_routers = self._finish_routers(begun, update.skipped)
        return begun.outcome(update, result(), nonfinite_routers)
