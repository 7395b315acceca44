"""The policy for non-finite losses and gradients: a few skipped steps, then FATAL with the batches on disk."""

from __future__ import annotations

import math

import torch.distributed as dist
from safetensors.torch import save_file

from m6.data.pretraining import MicroBatch
from m6.errors import UserError
from m6.files import atomic_path
from m6.runs.directory import NONFINITE, RunDirectory
from m6.runs.processes import Runtime
from m6.training.reporting.outcome import StepOutcome


class NonfinitePolicy:
    """Counts consecutive skipped steps.

    Steps with a finite loss do not count while the loss scale of fp16 can still fall: they are skipped to find it.

    Args:
        max_skipped_steps: largest number of consecutive skipped steps.
        smallest_loss_scale: below which the loss scale does not fall; 1 except in fp16.
    """

    def __init__(self, run: RunDirectory, max_skipped_steps: int, smallest_loss_scale: float) -> None:
        self._run, self._limit, self._smallest_scale = run, max_skipped_steps, smallest_loss_scale
        self.consecutive = 0

    def check(self, outcome: StepOutcome, micro_batches: list[MicroBatch], runtime: Runtime) -> None:
        """Checks a finished step; every rank calls this method.

        Args:
            micro_batches: this rank's micro-batches of the step, saved to RUN/nonfinite if the run ends.

        Raises:
            UserError: too many consecutive steps were skipped; RUN/FATAL holds the reason.
        """
        # A finite loss with non-finite fp16 gradients means that the loss scale is too large.
        expected = outcome.loss_scale > self._smallest_scale and math.isfinite(outcome.loss)
        self.consecutive = self.consecutive + 1 if outcome.skipped and not expected else 0
        if self.consecutive <= self._limit:
            return
        folder = self._run.root / NONFINITE
        routers, stages = ", ".join(outcome.nonfinite_routers), "; ".join(outcome.nonfinite_stages)
        reason = (
            f"step {outcome.step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}, "
            f"loss scale {outcome.loss_scale:g}; "
            f"{self.consecutive} steps in a row were not finite (m6.training.max_skipped_steps {self._limit}); "
            f"{f'gradients are not finite in {stages}; ' if stages else ''}"
            f"{f'router logits are not finite in {routers}; ' if routers else ''}batches in {folder}"
        )
        if runtime.is_main:
            self._run.fail(reason)
        for index, batch in enumerate(micro_batches):
            with atomic_path(
                folder / f"step_{outcome.step:08d}_rank_{runtime.rank:05d}_{index:03d}.safetensors"
            ) as temporary:
                save_file({name: value.contiguous() for name, value in batch.tensors().items()}, temporary)
        dist.barrier()  # the exit of one rank may kill the others: wait until all have written their batches
        raise UserError(reason)
