"""The key ``m6.training.batch_ramp``: smaller batches at the beginning of a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field, PositiveInt

from m6.config.shares import BatchSplit
from m6.errors import UserError
from m6.validation import Section


class BatchRampStage(Section):
    """Steps with a batch of their own."""

    steps: PositiveInt = Field(description="steps with this batch")
    batch_size: PositiveInt = Field(description="samples of a step over all ranks")


@dataclass(frozen=True)
class BatchSizes:
    """The global batch as a function of the step.

    Attributes:
        ramp: the stages at the beginning, in their order.
        final: samples of every step after them.
    """

    ramp: Sequence[BatchRampStage]
    final: int

    def of(self, step: int) -> int:
        """Samples of the step after ``step`` steps."""
        end = 0
        for stage in self.ramp:
            end += stage.steps
            if step < end:
                return stage.batch_size
        return self.final

    def before(self, step: int) -> int:
        """Samples of the first ``step`` steps."""
        samples, rest = 0, step
        for stage in self.ramp:
            steps = min(rest, stage.steps)
            samples, rest = samples + steps * stage.batch_size, rest - steps
        return samples + rest * self.final

    @property
    def all(self) -> list[int]:
        """The samples of all kinds of steps."""
        return [self.final, *(stage.batch_size for stage in self.ramp)]

    def check(self, split: BatchSplit) -> None:
        """Raises UserError if ranks cannot compute a batch of the run."""
        for key, samples, is_final in self._named():
            split.check(key, samples, is_final)

    def refusal(self, split: BatchSplit) -> str | None:
        """Why ranks cannot compute a batch of the run; None if they can."""
        for key, samples, is_final in self._named():
            for reason in split.refusals(samples, is_final):
                return f"{key} {samples}: {reason}"
        return None

    def _named(self) -> Iterator[tuple[str, int, bool]]:
        """(the key of a batch, its samples, whether it is the last one) of all kinds of steps."""
        yield "train_batch_size", self.final, True
        for stage in self.ramp:
            yield "m6.training.batch_ramp: batch_size", stage.batch_size, False

    def check_ramp(self, total_steps: int) -> None:
        """Raises UserError if the batch does not grow, or if the ramp does not end before the run."""
        sizes = [*(stage.batch_size for stage in self.ramp), self.final]
        if any(later <= earlier for earlier, later in itertools.pairwise(sizes)):
            raise UserError(
                f"m6.training.batch_ramp: expected growing batches below train_batch_size {self.final}, found "
                f"{', '.join(map(str, sizes[:-1]))}"
            )
        if (steps := sum(stage.steps for stage in self.ramp)) >= total_steps:
            raise UserError(
                f"m6.training.batch_ramp has {steps} steps, but the run has m6.training.total_steps {total_steps}: no "
                "step would have train_batch_size"
            )
