"""What happens when a loss or a gradient is not finite: skip a few times, then end as FATAL with evidence."""

from __future__ import annotations

import math

import torch.distributed as dist
from safetensors.torch import save_file

from m6.data.pretraining import MicroBatch
from m6.errors import UserError
from m6.files import atomic_path
from m6.runs.directory import RunDirectory
from m6.runs.processes import Runtime
from m6.training.reporting.outcome import StepOutcome


class NonfinitePolicy:
    """Counts consecutive skipped steps; fp16's search for a loss scale does not count."""

    def __init__(self, run: RunDirectory, max_skipped_steps: int, precision: str) -> None:
        self._run, self._limit, self._precision = run, max_skipped_steps, precision
        self.consecutive = 0

    def check(self, step: int, outcome: StepOutcome, micro_batches: list[MicroBatch], runtime: Runtime) -> None:
        """Raises after more than the allowed number of skipped steps in a row.

        The batches of the last step are saved to RUN/nonfinite, and RUN/FATAL says what happened.
        """
        expected = self._precision == "fp16" and math.isfinite(outcome.loss)
        self.consecutive = self.consecutive + 1 if outcome.skipped and not expected else 0
        if self.consecutive <= self._limit:
            return
        folder = self._run.root / "nonfinite"
        routers = ", ".join(outcome.nonfinite_routers)
        reason = (
            f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}; {self.consecutive} steps in a row "
            f"were not finite (m6.training.max_skipped_steps {self._limit}); "
            f"{f'router logits are not finite in {routers}; ' if routers else ''}batches in {folder}"
        )
        if runtime.is_main:
            self._run.fail(reason)
        for index, batch in enumerate(micro_batches):
            with atomic_path(folder / f"step_{step:08d}_rank_{runtime.rank:05d}_{index:03d}.safetensors") as temporary:
                save_file({name: value.contiguous() for name, value in batch.tensors().items()}, temporary)
        dist.barrier()  # the first rank to leave may take the others with it: all have written by then
        raise UserError(reason)
