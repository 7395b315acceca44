"""The key ``m6.training.batch_ramp``: smaller batches at the beginning of a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, PositiveInt

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

    def micro_batches(self, micro_batch_size: int, ranks: int) -> dict[str, int]:
        """Key and value of each batch -> micro-batches of a rank in its steps.

        Args:
            ranks: those that read different micro-batches; they divide every batch, see ``refusal``.
        """
        batches = {f"m6.training.batch_ramp: batch_size {stage.batch_size}": stage.batch_size for stage in self.ramp}
        batches[f"train_batch_size {self.final}"] = self.final
        return {name: samples // (micro_batch_size * ranks) for name, samples in batches.items()}

    def refusal(self, micro_batch_size: int, ranks: int) -> str | None:
        """Why so many ranks cannot compute every batch in micro-batches of this size; None if they can."""
        per_micro_step = micro_batch_size * ranks
        for stage in self.ramp:
            if stage.batch_size % per_micro_step:
                return (
                    f"m6.training.batch_ramp: batch_size {stage.batch_size} is not a multiple of "
                    f"train_micro_batch_size_per_gpu {micro_batch_size} x {ranks} ranks = {per_micro_step}"
                )
        return None

    def check(self, total_steps: int) -> None:
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
